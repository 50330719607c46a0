"""Lazy AdamW: the optimizer of n-gram embedding tables, of which a batch uses only some rows
(`optimizer.ngram_table`).

AdamW reads and writes every row of a table in every step, although the gradient of most rows is 0.
Lazy AdamW changes only the rows that the batch uses: their parameters, their moments (the running
means of the gradient and of its square), and their count of updates, with which the bias of the
moments is corrected. Lazy AdamW leaves a row that a batch does not use as it is; AdamW would move
the row further along its mean gradient, and decay it. The gradient is never an array of the table's
shape: the rows are looked up before the loss is differentiated, and are an input of the loss.

The gradient of each table is clipped by its own norm, separately from all other gradients. In the
norm of a table's gradient, each use of a row counts as a separate gradient.

Letters: B batch, T time, H rows of a token, V rows of a table, W their width.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from qwen3next_jax.config import ModelConfig, OptimizerConfig
from qwen3next_jax.model import parameter_declarations
from qwen3next_jax.model.layers import document_positions
from qwen3next_jax.sharding import row_tables


class TableGradient(NamedTuple):
    """The gradient of a table, as one gradient for each use of a row.

    Attributes:
      row_ids: int32 [B, T, H], the rows that each token uses.
      row_gradients: float32 [B, T, H · W], the gradient of each use of a row.
    """

    row_ids: jax.Array
    row_gradients: jax.Array


def embedding_number_by_table_path(model: ModelConfig) -> dict[tuple[str | int, ...], int]:
    """Returns path of a table in the parameters → number of the table's n-gram embedding, for all
    n-gram embeddings of the model.
    """
    stacks = {layers[0]: j for j, layers in enumerate(model.layer_stacks)}
    layers = sorted(i - 1 for i in model.ple.layer_ids)
    return {
        ("layers", stacks[layer], "embedding", "table"): number
        for number, layer in enumerate(layers)
    }


def look_up_batch_rows(
    model: ModelConfig, tables: Mapping, params: dict, batch: dict[str, jax.Array], mesh
) -> tuple[dict[int, jax.Array], dict[int, jax.Array]]:
    """Looks up the rows that the tokens of a batch use.

    Returns:
      (ids, rows), two dicts whose keys are the numbers of the n-gram embeddings: the ids of the
      rows, int32 [B, T, H], and the rows, [B, T, H · W] in the model's dtype.
    """
    positions = document_positions(batch["segment_ids"])
    ids, rows = {}, {}
    for path, number in tables.items():
        ids[number] = model.ple.embedding_class().ngram_ids(
            model, number, batch["tokens"], positions
        )
        table, declaration = leaf_at(params, path)[0], _declaration_at(model, path)
        rows[number] = row_tables.look_up_rows(
            table, ids[number], declaration, mesh, dtype=model.dtype
        )
    return ids, rows


def init(tables: Mapping, params: dict) -> dict:
    """Returns the state of lazy AdamW before the first step: "mu" and "nu", the running means of
    the gradients and of their squares, shaped like the tables; and "count" [1, V, 1], the number of
    updates of each row. Each of "mu", "nu" and "count" is a nested dict like the parameters.
    """
    state = {"mu": {}, "nu": {}, "count": {}}
    for path in tables:
        table = leaf_at(params, path)
        for name in ("mu", "nu"):
            state[name] = with_leaf_at(state[name], path, jnp.zeros_like(table))
        count = jnp.zeros((*table.shape[:-1], 1), jnp.int32)
        state["count"] = with_leaf_at(state["count"], path, count)
    return state


def table_gradient_norm(gradients: Mapping[int, TableGradient]) -> jax.Array:
    """Returns the L2 norm [] over the gradients of all uses of rows of all tables."""
    squares = (jnp.sum(jnp.square(g.row_gradients)) for g in gradients.values())
    return jnp.sqrt(sum(squares, jnp.zeros(())))


def update(
    model: ModelConfig,
    config: OptimizerConfig,
    tables: Mapping,
    params: dict,
    state: dict,
    gradients: Mapping[int, TableGradient],
    learning_rate: jax.Array,
    skip: jax.Array,
    mesh,
) -> tuple[dict, dict]:
    """Returns the tables, and the state of lazy AdamW, after an update.

    Args:
      tables: the result of `embedding_number_by_table_path`.
      params: nested dict with the tables.
      state: the state, as `init` returned it.
      gradients: number of an embedding → the gradient of its table.
      skip: bool, whether to change nothing.
    """
    for path, number in tables.items():
        gradient, declaration = gradients[number], _declaration_at(model, path)
        scale = jnp.ones(())
        if config.clip_norm:
            scale = jnp.minimum(
                scale, config.clip_norm / (table_gradient_norm({number: gradient}) + 1e-30)
            )
        decay = config.weight_decay if declaration.decays(config.decay_norm_weights) else 0.0

        def write(arrays, row_P, d_PW, scale, learning_rate, skip):
            w_PW, mu_PW, nu_PW, count_P1 = old = tuple(
                x_VW.at[row_P].get(mode="fill", fill_value=0) for x_VW in arrays
            )
            d_PW = d_PW * scale
            count_P1 = count_P1 + 1
            mu_PW = config.beta1 * mu_PW + (1 - config.beta1) * d_PW
            nu_PW = config.beta2 * nu_PW + (1 - config.beta2) * jnp.square(d_PW)
            mean_PW = mu_PW / (1 - config.beta1**count_P1)
            square_PW = nu_PW / (1 - config.beta2**count_P1)
            direction_PW = mean_PW / (jnp.sqrt(square_PW) + config.eps)
            w_PW = w_PW - learning_rate * (direction_PW + decay * w_PW)
            return tuple(
                x_VW.at[row_P].set(jnp.where(skip, before, after), mode="drop")
                for x_VW, before, after in zip(arrays, old, (w_PW, mu_PW, nu_PW, count_P1))
            )

        trees = (params, state["mu"], state["nu"], state["count"])
        arrays = row_tables.update_rows(
            tuple(leaf_at(tree, path)[0] for tree in trees),
            gradient.row_ids,
            gradient.row_gradients,
            declaration,
            mesh,
            write,
            (scale, learning_rate, skip),
        )
        params, *moments = (with_leaf_at(tree, path, x[None]) for tree, x in zip(trees, arrays))
        state = dict(zip(("mu", "nu", "count"), moments))
    return params, state


def leaf_at(tree: dict, path: tuple[str | int, ...]) -> jax.Array:
    """Returns the leaf of the nested dict `tree` at `path`."""
    for name in path:
        tree = tree[name]
    return tree


def with_leaf_at(tree: dict, path: tuple[str | int, ...], leaf: jax.Array) -> dict:
    """Returns a copy of the nested dict `tree` with `leaf` at `path`."""
    name, *rest = path
    return tree | {name: with_leaf_at(tree.get(name, {}), tuple(rest), leaf) if rest else leaf}


def _declaration_at(model: ModelConfig, path: tuple[str | int, ...]):
    return parameter_declarations(model)["/".join(map(str, path))]
