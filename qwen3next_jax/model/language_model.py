"""The Qwen3-Next model: embedding, decoder layers, final norm, output head, multi-token prediction
(MTP). "The trunk" is the model without the MTP module.

The kinds of layers repeat with a period (3 recurrent layers + 1 attention layer in the released
model). The layers at the same place of the period have their parameters stacked, and the period is
the body of one `lax.scan`. So for the released model, XLA compiles 4 layers in place of 48. Layers
before the periodic part, such as dense first layers, run one after another. If the pattern of the
layers has no period, all layers run one after another (`ModelConfig.layer_stacks`).

Letters: B batch, T time, D model, V vocabulary, E experts.
"""

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from qwen3next_jax.common.trees import path_string
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.layer_properties import check_mixers, empty_layer_cache, mixer_class
from qwen3next_jax.model.layer_stack import run_layers
from qwen3next_jax.model.layers import Context, ForwardOptions, document_positions
from qwen3next_jax.model.parameters import Make, ParameterDeclaration, check_declared, declared_tree
from qwen3next_jax.model.remat import keeps_expert_hidden, rematerialized
from qwen3next_jax.model.routing import check_expert_ids_shape, stack_expert_ids
from qwen3next_jax.model.targets import has_target_in_document
from qwen3next_jax.ops import linear_cross_entropy
from qwen3next_jax.sharding.rules import (
    CONTEXT,
    TENSOR,
    TOKENS,
    activation_spec,
    constrain,
    gather_in_shard,
    gather_params,
    non_manual_axes,
    num_shards,
    per_shard,
    storage_spec,
)


class Features(NamedTuple):
    """The results of a forward pass without logits. The training loss computes the logits from the
    states of this class piece by piece, to save memory.

    Attributes:
      hidden: the trunk's states [B, T, D] after the final norm.
      mtp_hidden: for each MTP depth d the states [B, T, D] after the MTP module's norm. The state
        of position t predicts token t+2+d; the states of a row's last 1+d positions mean nothing.
      router_statistics: the statistics that `SparseMoE` describes, for the trunk's layers with
        experts, each stacked on a leading axis in layer order; {} if there are no such layers.
      mtp_router_statistics: the same statistics for the layer of the MTP module, summed over
        depths; {} if that layer has no experts.
      layer_outputs, router_logits: the `hidden_states` and `router_logits` of `Output`; None unless
        `ForwardOptions.capture_layer_outputs` asks for them.
      expert_ids: [B, T, layers, A] int16, the experts of every token in every trunk layer, -1 in
        layers without experts; None unless `ForwardOptions.record_routing` asks for them.
      diagnostics: a dict of small arrays for each trunk layer (see the layers' classes) and, if the
        model has an MTP module, one more dict at the end, for that module's layer at depth 0. None
        unless `ForwardOptions.collect_stats` asks for diagnostics.
      mixer_losses: for each trunk layer whose mixer has a loss of its own, in layer order, the sum
        [] of the loss over tokens.
      mtp_mixer_loss: the sum of the mixer's own loss for the MTP module, over tokens and depths;
        None if the mixer has no such loss.
    """

    hidden: jax.Array
    mtp_hidden: tuple[jax.Array, ...]
    router_statistics: dict[str, jax.Array]
    mtp_router_statistics: dict[str, jax.Array]
    layer_outputs: tuple[jax.Array, ...] | None = None
    router_logits: tuple[jax.Array, ...] | None = None
    diagnostics: tuple[dict[str, jax.Array], ...] | None = None
    mixer_losses: tuple[jax.Array, ...] = ()
    mtp_mixer_loss: jax.Array | None = None
    expert_ids: jax.Array | None = None


class Output(NamedTuple):
    """The result of calling a `Qwen3Next`. Logits, router logits and the loss are float32.

    Attributes:
      logits: [B, T, V]; position t predicts token t+1.
      mtp_logits: for each MTP depth d the logits [B, T-1-d, V]; position t predicts token t+2+d.
      balance_loss: [], the balance loss of `pooled_balance_loss`; padding does not count.
      hidden_states: arrays [B, T, D]: the embeddings, then the output of every layer; the final
        norm is applied to the output of the last layer. If the residual stream is wider than the
        model (`model.streams`), all arrays but the last are as wide as the stream. None unless the
        caller asks for `output_hidden_states`.
      router_logits: for each layer with experts [B, T, E]; None unless the caller asks for
        `output_hidden_states`.
    """

    logits: jax.Array
    mtp_logits: tuple[jax.Array, ...]
    balance_loss: jax.Array
    hidden_states: tuple[jax.Array, ...] | None = None
    router_logits: tuple[jax.Array, ...] | None = None


class CrossEntropy(NamedTuple):
    """The loss of the output head. Only `weighted_loss_sum` has gradients.

    Attributes:
      weighted_loss_sum: [] float32, the weighted sum of the losses of the targets.
      is_best: [B, T] bool, whether the target has the largest logit.
      best_token: [B, T] int32, the token with the largest logit.
      nll: [B, T] float32, the cross-entropy of each target.
      logsumexp: [B, T] float32, the logarithm of the sum of the exponentials of the logits.
    """

    weighted_loss_sum: jax.Array
    is_best: jax.Array
    best_token: jax.Array
    nll: jax.Array
    logsumexp: jax.Array


class Qwen3Next(nnx.Module):
    """A Qwen3-Next language model. The argument `dtype` is the dtype of the parameters. The
    operands of matrix products are cast to `config.dtype`.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: Any = jnp.float32):
        check_mixers(config)
        self.config = c = config
        make = Make(c, rngs, dtype=dtype)
        self.embedding = make.matrix(
            (c.vocab_size, c.hidden_size), "vocab embed", kind="embedding", gathered_by="operator"
        )
        self.positions = c.block.import_part("positions")(c, make)
        block = c.block.import_part("placement")
        self.layers = nnx.List(
            [
                block(c, *c.mixers_and_sparsity[indices[0]], make.stacked(len(indices)), indices)
                for indices in c.layer_stacks
            ]
        )
        for number, layer in enumerate(sorted(c.ple.layer_ids)):
            (stack_with_layer,) = [
                stack for stack, indices in zip(self.layers, c.layer_stacks) if layer - 1 in indices
            ]
            stack_with_layer.embedding = c.ple.embedding_class()(c, make.stacked(1), number)
        self.final_norm = block.make_final_norm(c, make)
        if not c.tie_word_embeddings:
            self.head = make.matrix(
                (c.hidden_size, c.vocab_size), "embed -> vocab", kind="head", gathered_by="operator"
            )
        if c.mtp_depth:
            self.mtp = block.multi_token_prediction(c, make)
        if c.lora.rank:
            from qwen3next_jax.model.adapters import add_adapters

            add_adapters(self, c, make)
        check_declared(self)

    def __repr__(self) -> str:
        """Returns a line of text for each part of the model, so that a notebook stays readable.
        `print(nnx.state(model))` shows every parameter.
        """
        lines = [f"Qwen3Next with {_number_of_parameters(self):,} parameters"]
        lines.append(f"  embedding {list(self.embedding.shape)}")
        for block, layers in zip(self.layers, self.config.layer_stacks):
            mixer, has_experts = self.config.mixers_and_sparsity[layers[0]]
            mlp = f"{self.config.num_experts} experts" if has_experts else "dense MLP"
            size = _number_of_parameters(block) // len(layers)
            which = ", ".join(map(str, layers))
            lines.append(f"  layers {which}: {mixer}, {mlp}, {size:,} parameters each")
        if self.config.mtp_depth:
            size = _number_of_parameters(self.mtp)
            lines.append(f"  multi-token prediction: {self.config.full_mixer}, {size:,} parameters")
        return "\n".join(lines)

    __str__ = __repr__

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        *,
        output_hidden_states: bool = False,
    ) -> Output:
        """Computes logits at every position and MTP depth.

        Args:
          tokens: [B, T] int32.
          segment_ids: [B, T] int32, non-decreasing along T: documents 1, 2, …, then 0 for padding
            at the end. No layer passes information from one document to another. None: every row is
            one document.
          output_hidden_states: also return each layer's output and router logits.
        """
        f = self.features(
            tokens, segment_ids, options=ForwardOptions(capture_layer_outputs=output_hidden_states)
        )
        mtp_logits = tuple(
            self.logits(h[:, : max(tokens.shape[1] - 1 - d, 0)]) for d, h in enumerate(f.mtp_hidden)
        )
        return Output(
            self.logits(f.hidden),
            mtp_logits,
            pooled_balance_loss(f.router_statistics),
            f.layer_outputs,
            f.router_logits,
        )

    def features(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        *,
        mesh: Mesh | None = None,
        remat: str = "none",
        options: ForwardOptions = ForwardOptions(),
        embedding_rows: dict[int, jax.Array] | None = None,
        replayed_expert_ids: jax.Array | None = None,
    ) -> Features:
        """Runs the forward pass without the output head.

        Args:
          tokens, segment_ids: as in `__call__`.
          mesh: the devices that share the pass, with parameters as `sharding.rules` places them;
            None for one device.
          remat: the policy for the backward pass (`model.remat`).
          options: what to return beside the states.
          embedding_rows: the rows that layers with an n-gram embedding use (see `Context`).
          replayed_expert_ids: [B, T, layers, A] int16, the experts that the tokens use in place of
            the experts that the routers would choose; for a token with -1 the router chooses.
            Layers without experts, and the MTP module, ignore `replayed_expert_ids`. None: the
            routers choose for all tokens.

        Raises:
          UserError: the shape of `replayed_expert_ids` does not fit the model's number of layers or
            of experts per token.
        """
        if replayed_expert_ids is not None:
            check_expert_ids_shape(self.config, replayed_expert_ids.shape)
        embedded = self.embed(tokens, mesh)
        remat = self._remat_policy(remat, embedded.dtype)
        context = self._context_with_tokens(
            Context(
                _token_positions(tokens, segment_ids),
                segment_ids,
                None if segment_ids is None else segment_ids > 0,
                mesh,
                embedding_rows=embedding_rows,
                replayed_expert_ids=replayed_expert_ids,
                options=options._replace(keep_expert_hidden=keeps_expert_hidden(remat)),
            ),
            tokens,
        )
        entered = self._residual_from_embeddings(embedded, context.positions)
        x, per_layer, _ = run_layers(self.layers, self.config, entered, context, remat=remat)
        hidden = constrain(self.head_input(x), mesh, "batch", "time", None)
        mtp_results = self._run_mtp(x, hidden, embedded, context, remat)
        return self._make_features(entered, per_layer, hidden, mtp_results, options)

    def _remat_policy(self, remat: str, dtype: jnp.dtype) -> str:
        """Returns the policy `remat`, but "kept" in place of "none" if the dtype is bfloat16 and
        all mixers and MLPs mark their results with `ops.blocks.save_for_backward`.
        """
        results_are_named = (
            all(vars(mixer_class(name)).get("marks_saved_results") for name in self.config.mixers)
            and self.config.block.mlp == "swiglu"
            and self.config.moe.experts == "swiglu"
        )
        return "kept" if remat == "none" and results_are_named and dtype.itemsize < 4 else remat

    def _make_features(
        self,
        entered: jax.Array,
        per_layer: list[dict[str, Any]],
        hidden: jax.Array,
        mtp_results: "_MTPResults",
        options: ForwardOptions,
    ) -> Features:
        """Returns the `Features` of a forward pass.

        Args:
          entered: the residual stream before the first layer.
          per_layer: the auxiliary outputs of the trunk's layers.
          hidden: the trunk's states after the final norm.
          mtp_results: the results of the MTP module.
          options: what the caller asks for.
        """
        features = Features(
            hidden,
            mtp_results.hidden,
            stack_router_statistics(per_layer),
            mtp_results.router_statistics,
            mixer_losses=tuple(aux["mixer_loss"] for aux in per_layer if "mixer_loss" in aux),
            mtp_mixer_loss=mtp_results.mixer_loss,
        )
        if options.capture_layer_outputs:
            features = features._replace(
                layer_outputs=(entered, *(aux["x"] for aux in per_layer[:-1]), hidden),
                router_logits=tuple(
                    aux["router_logits"] for aux in per_layer if "router_logits" in aux
                ),
            )
        if options.collect_stats:
            diagnostics = (*(aux["diagnostics"] for aux in per_layer), *mtp_results.diagnostics)
            features = features._replace(diagnostics=diagnostics)
        if options.record_routing:
            expert_ids = stack_expert_ids(self.config, per_layer, hidden.shape[:2])
            features = features._replace(expert_ids=expert_ids)
        return features

    def decode(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        cache: list,
        segment_ids: jax.Array | None = None,
        mesh: Mesh | None = None,
        return_all_states: bool = False,
        final_norm: bool = True,
        record_routing: bool = False,
    ) -> tuple[jax.Array, list] | tuple[jax.Array, list, jax.Array]:
        """Runs the forward pass for some new tokens of each row. A cache holds what the layers need
        of earlier tokens.

        Args:
          tokens: [B, T].
          positions: [B, T], each token's position, which is also its slot of the cache; consecutive
            in each row.
          cache: the result of `init_cache` or of this function.
          segment_ids: [B, T], 1 for a token, 0 for padding at the end; None: no padding. Padding
            changes no cache entry that a later token reads.
          mesh: the devices; None: one device. `data` × `expert` split B; T is not split.
          return_all_states: whether caches of kind "state" (`Mixer.cache_kind`) are returned after
            every token, [layers, B, T, …], and not only after the last token. Returning all states
            requires segment_ids = None.
          final_norm: whether to apply the final norm.
          record_routing: whether to return the experts of every token.

        Returns:
          The states [B, T, D] after the final norm, or the residual stream before the norm if
          `final_norm` is False; the cache after these tokens; with `record_routing` also the
          experts of every token, [B, T, layers, A] int16.
        """
        context = Context(
            positions,
            segment_ids,
            mesh=mesh,
            logical_time_axis=None,
            options=ForwardOptions(
                return_all_states=return_all_states, record_routing=record_routing
            ),
        )
        context = self._context_with_tokens(context, tokens)
        x = self._residual_from_embeddings(self.embed(tokens, mesh, time=None), positions)
        x, per_layer, cache = run_layers(self.layers, self.config, x, context, cache)
        states = self.head_input(x) if final_norm else x
        if record_routing:
            return states, cache, stack_expert_ids(self.config, per_layer, tokens.shape)
        return states, cache

    def init_cache(self, batch: int, length: int) -> list:
        """Returns the cache before the first token, with `length` slots: a dict of arrays
        [layers, B, …] for each group of stacked layers (`ModelConfig.layer_stacks`).
        """

        def empty(layers: tuple[int, ...]):
            cache = empty_layer_cache(self.config, layers[0], batch, length)
            return jax.tree.map(
                lambda leaf: jnp.broadcast_to(leaf, (len(layers), *leaf.shape)), cache
            )

        return [empty(layers) for layers in self.config.layer_stacks]

    def embed(
        self, tokens: jax.Array, mesh: Mesh | None = None, time: str | None = "time"
    ) -> jax.Array:
        """Looks up the embeddings of tokens: [B, T] → [B, T, D] in `config.dtype`. On a mesh, each
        shard along `tensor` looks up the tokens of its part of the vocabulary. `time`: the logical
        axis of T (see `Context`).

        Tokens outside the vocabulary give wrong embeddings without an error. If this function is
        traced under `jax.debug_nans(True)`, a host callback raises a ValueError for tokens outside
        the vocabulary, which a compiled program reports as a `jax.errors.JaxRuntimeError`.
        """
        if jax.config.jax_debug_nans:
            _check_tokens(tokens, self.config.vocab_size)
        if mesh is None:
            return self.embedding[...][tokens].astype(self.config.dtype)
        shape, declared = self.embedding.shape, self.embedding.declared

        def look_up(table_VD, tokens_BT):
            table_VD = gather_in_shard(table_VD, declared, shape, mesh)
            if table_VD.shape[0] == shape[0]:
                return table_VD[tokens_BT].astype(self.config.dtype)
            index_BT = tokens_BT - jax.lax.axis_index(TENSOR) * table_VD.shape[0]
            inside_BT = (index_BT >= 0) & (index_BT < table_VD.shape[0])
            rows_BTD = table_VD[jnp.where(inside_BT, index_BT, 0)].astype(self.config.dtype)
            return jax.lax.psum(jnp.where(inside_BT[..., None], rows_BTD, 0), TENSOR)

        in_specs = (storage_spec(declared, shape, mesh), activation_spec("batch", time))
        return per_shard(look_up, mesh, in_specs, activation_spec("batch", time, None))(
            self.embedding[...], tokens
        )

    def cross_entropy(
        self,
        hidden: jax.Array,
        targets: jax.Array,
        weights: jax.Array,
        mesh: Mesh | None = None,
        z_weight: float = 0.0,
    ) -> "CrossEntropy":
        """Computes Σ weights · (cross-entropy + z_weight · logsumexp²) of the output head, without
        an array of all logits.

        Args:
          hidden: [B, T, D].
          targets: [B, T] int32.
          weights: [B, T] float32, 0 where there is no target.
          mesh: the devices, which share the tokens; None: one device. The tokens are also split
            along `tensor`, if the product of the sizes of `context` and `tensor` divides T.
          z_weight: the weight of the z-loss.
        """
        tied = self.config.tie_word_embeddings
        parameter = self.embedding if tied else self.head
        table, declared, shape = parameter[...], parameter.declared, parameter.shape
        if mesh is not None and declared.uses_model_dtype:
            table = table.astype(self.config.dtype)  # the dtype in which the table is gathered

        def sum_up(hidden_BTD, table, targets_BT, weights_BT):
            if mesh is not None:
                table = gather_in_shard(table, declared, shape, mesh, whole=True)
            head_DV = table.T if tied else table
            loss, rows = linear_cross_entropy(
                hidden_BTD.reshape(-1, hidden_BTD.shape[-1]),
                head_DV,
                targets_BT.reshape(-1),
                weights_BT.reshape(-1),
                z_weight=z_weight,
                softcap=self.config.logit_softcap,
            )
            if mesh is not None:
                loss = jax.lax.psum(loss, non_manual_axes(mesh, axes))
            per_row = (rows.correct, rows.argmax, rows.nll, rows.logsumexp)
            return CrossEntropy(loss, *(x.reshape(targets_BT.shape) for x in per_row))

        # Unlike the layers, the loss can also split time over `tensor`.
        hidden = constrain(hidden, mesh, "batch", "time", None)
        divides = mesh is not None and hidden.shape[1] % num_shards(mesh, CONTEXT, TENSOR) == 0
        time, axes = ("time_rows", (*TOKENS, TENSOR)) if divides else ("time", TOKENS)
        tokens = activation_spec("batch", time)
        stored = None if mesh is None else storage_spec(declared, shape, mesh)
        return per_shard(
            sum_up,
            mesh,
            (activation_spec("batch", time, None), stored, tokens, tokens),
            CrossEntropy(P(), tokens, tokens, tokens, tokens),
        )(hidden, table, targets, weights)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Computes the logits [..., V], float32, of states [..., D] after the final norm."""
        head_DV = self.embedding[...].T if self.config.tie_word_embeddings else self.head[...]
        logits = jnp.einsum(
            "...d,dv->...v",
            hidden,
            head_DV.astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        cap = self.config.logit_softcap
        return cap * jnp.tanh(logits / cap) if cap else logits

    def _residual_from_embeddings(self, embedded: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns the residual stream before the first layer, computed from the embeddings."""
        placement = self.config.block.import_part("placement")
        return placement.residual_from_embeddings(self.positions(embedded, positions), self.config)

    def head_input(self, x: jax.Array) -> jax.Array:
        """Returns the input of the output head, [B, T, D], from the residual stream x after the
        last layer: the final norm of x, or another function of x that the placement of the norms
        (`model.block.placement`) defines.
        """
        return self.config.block.import_part("placement").head_input(
            x, self.final_norm, self.config
        )

    def _context_with_tokens(self, context: Context, tokens: jax.Array) -> Context:
        return context._replace(tokens=tokens) if self.config.ple.layer_ids else context

    def _run_mtp(
        self, x: jax.Array, hidden: jax.Array, embedded: jax.Array, context: Context, remat: str
    ) -> "_MTPResults":
        """Runs the MTP module at every depth.

        Args:
          x, hidden: the trunk's states before and after the final norm.
          embedded: the embeddings of the tokens.
          context: the inputs that all layers share.
          remat: the remat policy (`model.remat`).
        """
        states, total, diagnostics = [], {}, []
        if not self.config.mtp_depth:
            return _MTPResults((), {}, (), None)
        context = context._replace(
            replayed_expert_ids=None, options=context.options._replace(record_routing=False)
        )
        graphdef, params = nnx.split(self.mtp)
        if self.config.lora.rank:
            from qwen3next_jax.model.adapters import merge_adapters

            params = merge_adapters(params, self.config.lora)
        module = nnx.merge(graphdef, params)
        state = module.next_depth_state(x, hidden)
        segment_ids = (
            jnp.ones(hidden.shape[:2], jnp.int32)
            if context.segment_ids is None
            else context.segment_ids
        )
        for depth in range(self.config.mtp_depth):
            counted = has_target_in_document(segment_ids, 2 + depth)
            graphdef, params = nnx.split(module)

            def apply(params, state, shifted, graphdef=graphdef, counted=counted):
                params = gather_params(params, context.mesh, self.config.dtype)
                x, aux, _ = nnx.merge(graphdef, params).run_layer(
                    state, shifted, context._replace(stats_mask=counted)
                )
                return constrain(x, context.mesh, "batch", "time", None), aux

            x, aux = rematerialized(apply, remat)(
                params, state, jnp.roll(embedded, -(1 + depth), axis=1)
            )
            # The norm is outside of `apply`. Its gradient needs x; inside, remat would compute the
            # whole layer, with the experts, a second time to get x.
            hidden = module.head_input(x)
            state = module.next_depth_state(x, hidden)
            aux.pop("router_logits", None)
            if context.options.collect_stats:
                diagnostics.append(aux.pop("diagnostics"))
            total = jax.tree.map(jnp.add, total, aux) if total else aux
            states.append(hidden)
        mixer_loss = total.pop("mixer_loss", None)
        return _MTPResults(tuple(states), total, tuple(diagnostics[:1]), mixer_loss)


class _MTPResults(NamedTuple):
    """The results of the MTP module.

    Attributes:
      hidden: for each depth the states [B, T, D] after the norm.
      router_statistics: the router statistics, summed over depths.
      diagnostics: the diagnostics of the module's layer at depth 0; empty if the caller does not
        collect diagnostics.
      mixer_loss: the mixer's own loss, summed over depths; None if the mixer has no loss.
    """

    hidden: tuple[jax.Array, ...]
    router_statistics: dict[str, jax.Array]
    diagnostics: tuple[dict[str, jax.Array], ...]
    mixer_loss: jax.Array | None


def _token_positions(tokens: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Returns each token's position in its document, [B, T] int32; without segment ids, a row is
    one document.
    """
    if segment_ids is None:
        return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return document_positions(segment_ids)


def stack_router_statistics(per_layer: Sequence[dict[str, Any]]) -> dict[str, jax.Array]:
    """Returns the router statistics of all layers with experts, each stacked in layer order
    (`Features.router_statistics`), from the auxiliary outputs of the layers.
    """
    names = ("load", "probability", "z", "tokens", "required_bias")
    statistics = [
        {name: aux[name] for name in names if name in aux} for aux in per_layer if "load" in aux
    ]
    return jax.tree.map(lambda *layers: jnp.stack(layers), *statistics) if statistics else {}


@functools.lru_cache(maxsize=256)
def parameter_declarations(config: ModelConfig) -> Mapping[str, ParameterDeclaration]:
    """Returns {path, such as "layers/0/mixer/q_proj": declaration} for every parameter of a model
    with these settings. It allocates no arrays.
    """
    model = nnx.eval_shape(lambda: Qwen3Next(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree_util.tree_leaves_with_path(declared_tree(nnx.state(model, nnx.Param)))
    return types.MappingProxyType({path_string(path): leaf for path, leaf in leaves})


def _number_of_parameters(module: nnx.Module) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))


def pooled_balance_loss(router: dict[str, jax.Array]) -> jax.Array:
    """Returns the balance loss, a scalar, by the formula of transformers'
    `load_balancing_loss_func`. The loss is computed from the choices and probabilities of all
    layers together. In perfect balance the loss is the number of experts per token. `router`: the
    router statistics, as in `Features`.
    """
    if not router:
        return jnp.zeros((), jnp.float32)
    tokens = jnp.maximum(jnp.sum(router["tokens"]), 1.0)
    load, probability = (
        jnp.sum(router["load"], axis=0) / tokens,
        jnp.sum(router["probability"], axis=0) / tokens,
    )
    return load.shape[0] * jnp.sum(load * probability)


def _check_tokens(tokens: jax.Array, vocab_size: int) -> None:
    """Adds a host callback to the program; the callback raises ValueError if a token is outside of
    0 … `vocab_size` - 1.
    """

    def report(lowest, highest):
        if lowest < 0 or highest >= vocab_size:
            raise ValueError(
                f"tokens are {lowest} … {highest}: expected 0 … {vocab_size - 1}, the vocabulary"
            )

    jax.debug.callback(report, jnp.min(tokens), jnp.max(tokens))
