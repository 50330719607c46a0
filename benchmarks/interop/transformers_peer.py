"""The transformers side of parity.py, decoding.py, training_speed.py and delta_rule.py, which run
it in an interpreter that has torch.

    transformers_peer.py logits MODEL_DIR TOKENS.safetensors LOGITS.safetensors
    transformers_peer.py train MODEL_DIR TOKENS.safetensors
        reads commands from standard input and answers each, one JSON object a line
    transformers_peer.py generate MODEL_DIR
        the same for greedy continuations
    transformers_peer.py kimi_reference DIRECTORY
        writes a tiny Kimi Linear and its cases; `python -m tests.references` makes the fixture
        from them
    transformers_peer.py qwen4_reference DIRECTORY SETTINGS.json
        writes a tiny Qwen3.8-Flash-Next of these settings and its cases
    transformers_peer.py olmo_hybrid_reference DIRECTORY SETTINGS.json
        writes a tiny Olmo Hybrid of these settings and its cases
    transformers_peer.py delta_rule INPUTS.safetensors RESULTS.safetensors
        writes results, then answers each line {"runs": N} with the seconds of N runs

Imports nothing of this project: its interpreter need not have JAX, nor the same Python version.
"""

import ctypes
import gc
import json
import pathlib
import sys
import tempfile
import time

import torch
import transformers
from safetensors.torch import load_file, save_file

# Keep freed memory instead of giving it back to the system, as this project's commands do (see
# qwen3next_jax/commands/process_setup.py).
for option, value in ((-1, 2**31 - 1), (-4, 0), (-8, 1)):
    ctypes.CDLL(None).mallopt(option, value)


def load(directory, **kwargs):
    """The model in float32, of the class that config.json names, and how many of its tensors
    were missing or misshapen in the directory, or none of the model's (those of the multi-token
    prediction module, which it does not have, aside).
    """
    architecture = json.loads((pathlib.Path(directory) / "config.json").read_text())[
        "architectures"
    ][0]
    model, info = getattr(transformers, architecture).from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True, **kwargs
    )
    unexpected = [name for name in info["unexpected_keys"] if not name.startswith("mtp.")]
    return model, len(info["missing_keys"]) + len(info["mismatched_keys"]) + len(unexpected)


def logits(directory, tokens_file, out_file):
    model, missing = load(directory)
    tokens = load_file(tokens_file)["input_ids"].long()
    with torch.no_grad():
        out = model(tokens).logits
        # Without a mask generate() takes tokens of the padding's number for padding, wherever they
        # stand.
        greedy = model.generate(
            tokens[:1],
            attention_mask=torch.ones_like(tokens[:1]),
            max_new_tokens=24,
            do_sample=False,
        )
    save_file({"logits": out.contiguous(), "greedy": greedy.int()}, out_file)
    print(
        json.dumps(
            {
                "transformers": transformers.__version__,
                "torch": torch.__version__,
                "missing": missing,
            }
        )
    )


def kimi_reference(directory):
    """Writes a random Kimi Linear of 5 layers (KDA with a dense MLP, then KDA and MLA twice) and
    what it computes. Norm weights and the router's biases are drawn, too, so that none is where
    it has no effect; of the router's groups there are 4, where the released model has one.
    Gradients are those of the next token's cross-entropy, under the names of the checkpoint.
    """
    torch.manual_seed(0)
    linear, full = "linear_attention", "full_attention"
    model = transformers.KimiLinearForCausalLM(
        transformers.KimiLinearConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=32,
            num_hidden_layers=5,
            num_attention_heads=2,
            num_key_value_heads=2,
            n_shared_experts=2,
            kv_lora_rank=24,
            qk_rope_head_dim=8,
            v_head_dim=16,
            qk_nope_head_dim=16,
            n_group=4,
            topk_group=2,
            num_experts_per_tok=2,
            num_local_experts=8,
            max_position_embeddings=512,
            linear_head_dim=16,
            linear_num_heads=2,
            layer_types=[linear, linear, full, linear, full],
            initializer_range=0.1,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor += torch.randn(tensor.shape) * (
                0.2 if "norm" in name else 0.05 if name.endswith("e_score_correction_bias") else 0
            )
    tokens = torch.randint(256, (2, 100))
    out = model(tokens, output_hidden_states=True, output_router_logits=True)
    loss = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )
    loss.backward()
    greedy = model.generate(
        tokens[:1], attention_mask=torch.ones_like(tokens[:1]), max_new_tokens=24, do_sample=False
    )
    cases = {
        "input_ids": tokens.int(),
        "logits": out.logits,
        "cross_entropy": loss[None],
        "greedy": greedy.int(),
    }
    cases |= {f"hidden_states.{i}": x for i, x in enumerate(out.hidden_states)}
    cases |= {f"router_logits.{i}": x for i, x in enumerate(out.router_logits)}
    model.save_pretrained(directory)
    # saved as weights, whose names they then have
    with torch.no_grad(), tempfile.TemporaryDirectory() as gradients:
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
        model.save_pretrained(gradients)
        cases |= {
            f"grad.{name}": x
            for name, x in released_names(gradients).items()
            if not name.endswith("e_score_correction_bias")
        }
    save_file(
        {name: x.detach().contiguous() for name, x in cases.items()},
        f"{directory}/cases.safetensors",
    )
    save_file(
        released_names(directory), f"{directory}/model.safetensors", metadata={"format": "pt"}
    )


def qwen4_model(settings, is_wrapper):
    """A random model of these settings, and the text model in it."""
    if is_wrapper:
        vision = dict(
            depth=1,
            hidden_size=16,
            intermediate_size=24,
            num_heads=2,
            patch_size=4,
            out_hidden_size=settings["hidden_size"],
            num_position_embeddings=16,
        )
        config = transformers.Qwen4ExpConfig(
            text_config=settings,
            vision_config=vision,
            tie_word_embeddings=settings.get("tie_word_embeddings", False),
        )
        model = transformers.Qwen4ExpForConditionalGeneration(config)
        return model, model.model.language_model
    model = transformers.Qwen4ExpForCausalLM(transformers.Qwen4ExpTextConfig(**settings))
    return model, model.model


def qwen4_reference(directory, settings_file):
    """Writes a random Qwen3.8-Flash-Next and what it computes.

    The file of settings holds fields of the text model's configuration; "rows": the shape of the
    tokens; "wrapper": whether the text model stands in a wrapper with a vision tower. Norms and
    convolutions are drawn, too. Of blocks with equal scores the lowest is selected, as
    torch.topk promises nothing.
    """
    stable = lambda x, k, dim=-1, **_: tuple(
        y.narrow(dim, 0, k) for y in torch.sort(x, dim=dim, descending=True, stable=True)
    )
    torch.topk = torch.Tensor.topk = lambda *args, **more: torch.return_types.topk(
        stable(*args, **more)
    )
    # One stream, and an n-gram embedding on an attention layer, are refused by the configuration
    # alone: the model can compute them.
    checks = transformers.Qwen4ExpTextConfig.__class_validators__
    checks[:] = [check for check in checks if check.__name__ != "validate_architecture"]
    torch.manual_seed(0)
    settings = json.loads(pathlib.Path(settings_file).read_text())
    rows, is_wrapper = settings.pop("rows"), settings.pop("wrapper", False)
    model, text = qwen4_model(settings, is_wrapper)
    model.eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or "conv1d" in name:
                tensor += 0.2 * torch.randn(tensor.shape)
    found = {}

    def note(module, name, f):
        def hook(_, given, made):
            found.setdefault(name, f(given, made))

        module.register_forward_hook(hook)

    kinds = text.config.layer_types
    if text.config.ple_layer_ids:
        table = text.layers[text.config.ple_layer_ids[0] - 1].ple.ple_embedding.ngram_embedding
        note(table, "ngram_ids.first_ple_layer", lambda given, _: given[0].int())
    if "indexed_attention" in kinds:
        indexer = text.layers[kinds.index("indexed_attention")].self_attn.indexer
        note(indexer, "selected.first_attention_layer", lambda _, made: made[:, 0].byte())
    tokens = torch.randint(text.config.vocab_size, rows)
    eos = text.config.eos_token_id
    tokens[torch.rand(rows) < 0.08] = eos[0] if isinstance(eos, list) else eos
    out = model(tokens, output_hidden_states=True, output_router_logits=True, use_cache=False)
    loss = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )
    cases = {
        "input_ids": tokens.int(),
        "logits": out.logits,
        "cross_entropy": loss[None],
        "balance_loss": out.aux_loss[None],
        **found,
    }
    cases |= {f"hidden_states.{i}": x for i, x in enumerate(out.hidden_states)}
    cases |= {f"router_logits.{i}": x for i, x in enumerate(out.router_logits)}
    loss.backward()
    model.generation_config.eos_token_id = None
    cases["greedy"] = model.generate(
        tokens[:1],
        attention_mask=torch.ones_like(tokens[:1]),
        max_new_tokens=24,
        do_sample=False,
        use_cache=False,  # there is no cache of an n-gram embedding on an attention layer
    ).int()
    model.save_pretrained(directory)
    # saved as weights, whose names they then have
    with torch.no_grad(), tempfile.TemporaryDirectory() as gradients:
        for parameter in model.parameters():
            parameter.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
        model.save_pretrained(gradients)
        cases |= {
            f"grad.{name.replace('model.language_model.', 'model.')}": x
            for name, x in load_file(f"{gradients}/model.safetensors").items()
            if x.is_floating_point() and "visual" not in name
        }
    save_file(
        {name: x.detach().contiguous() for name, x in cases.items()},
        f"{directory}/cases.safetensors",
    )


def olmo_hybrid_reference(directory, settings_file):
    """Writes a random Olmo Hybrid and what it computes.

    The file of settings holds fields of its configuration; "rows": the shape of the tokens. Norms
    and convolutions are drawn, too. Tensors and gradients have the names of the released model:
    those of the modules, with a convolution each for q, k and v.
    """
    torch.manual_seed(0)
    settings = json.loads(pathlib.Path(settings_file).read_text())
    rows = settings.pop("rows")
    config = transformers.OlmoHybridConfig(**settings)
    model = transformers.OlmoHybridForCausalLM(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or "conv1d" in name:
                tensor += 0.2 * torch.randn(tensor.shape)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim

    def released(tensors):
        named = {}
        for name, x in tensors:
            if ".conv1d." in name:
                parts = zip("qkv", torch.split(x, (keys, keys, values)))
                named |= {name.replace("conv1d", f"{part}_conv1d"): y for part, y in parts}
            else:
                named[name] = x
        return {name: x.detach().clone().contiguous() for name, x in named.items()}

    tokens = torch.randint(config.vocab_size, rows)
    out = model(tokens, output_hidden_states=True, use_cache=False)
    loss = torch.nn.functional.cross_entropy(
        out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    )
    loss.backward()
    model.generation_config.eos_token_id = None
    greedy = model.generate(
        tokens[:1], attention_mask=torch.ones_like(tokens[:1]), max_new_tokens=24, do_sample=False
    )
    cases = {
        "input_ids": tokens.int(),
        "logits": out.logits,
        "cross_entropy": loss[None],
        "greedy": greedy.int(),
    }
    cases |= {f"hidden_states.{i}": x for i, x in enumerate(out.hidden_states)}
    gradients = released((name, x.grad) for name, x in model.named_parameters())
    cases |= {f"grad.{name}": x for name, x in gradients.items()}
    config.architectures = ["OlmoHybridForCausalLM"]
    config.dtype = "float32"
    config.save_pretrained(directory)
    save_file(
        {name: x.detach().contiguous() for name, x in cases.items()},
        f"{directory}/cases.safetensors",
    )
    weights = released(model.named_parameters())
    save_file(weights, f"{directory}/model.safetensors", metadata={"format": "pt"})


def released_names(directory):
    """Its tensors; transformers 5.23 saves a dense layer's under the name of a mixture, which it
    reads as well as the released one.
    """
    tensors = load_file(f"{directory}/model.safetensors")
    return {
        name.replace("block_sparse_moe", "mlp") if ".layers.0." in name else name: x
        for name, x in tensors.items()
    }


class Trainer:
    """Forward, backward, clipping and AdamW on the batches of `tokens` [batches, B, T], in
    order, again and again.
    """

    def __init__(
        self,
        directory,
        tokens,
        attention,
        experts,
        compiled,
        learning_rate,
        betas,
        eps,
        weight_decay,
        clip_norm,
    ):
        self.model, _ = load(
            directory, attn_implementation=attention, experts_implementation=experts
        )
        self.model.train()
        self.forward = torch.compile(self.model) if compiled else self.model
        self.tokens, self.step, self.clip_norm = tokens, 0, clip_norm
        # The fused form is torch's fastest AdamW on CPU too.
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=learning_rate,
            betas=tuple(betas),
            eps=eps,
            weight_decay=weight_decay,
            fused=True,
        )

    def run(self, steps):
        """→ (seconds, loss) of each step."""
        results = []
        for _ in range(steps):
            batch = self.tokens[self.step % len(self.tokens)]
            start = time.perf_counter()
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.forward(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
            self.optimizer.step()
            results.append((time.perf_counter() - start, loss.item()))
            self.step += 1
        return results


def train(directory, tokens_file):
    tokens = load_file(tokens_file)["input_ids"].long()
    trainer = None
    print(
        json.dumps({"transformers": transformers.__version__, "torch": torch.__version__}),
        flush=True,
    )
    for line in sys.stdin:
        command = json.loads(line)
        if "threads" in command:
            torch.set_num_threads(command["threads"])
            answer = {"threads": torch.get_num_threads()}
        elif "new" in command:
            trainer = None
            gc.collect()
            trainer = Trainer(directory, tokens, **command["new"])
            answer = {"parameters": sum(p.numel() for p in trainer.model.parameters())}
        else:
            seconds, losses = zip(*trainer.run(command["steps"]))
            answer = {"seconds": seconds, "losses": losses}
        print(json.dumps(answer), flush=True)


def generate(directory):
    """Greedy continuations of prompts of one length, by the fastest of transformers' ways to
    compute attention and experts.
    """
    ways = [
        dict(attn_implementation=attention, experts_implementation=experts)
        for attention in ("sdpa", "eager")
        for experts in ("grouped_mm", "batched_mm", "eager")
    ]
    models = [load(directory, **way)[0].eval() for way in ways]
    fastest = {}
    print(
        json.dumps({"transformers": transformers.__version__, "torch": torch.__version__}),
        flush=True,
    )

    def run(model, command, new):
        ids = torch.tensor(command["prompts"])
        started = time.process_time()
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
            )
        return time.process_time() - started, out[:, ids.shape[1] :].tolist()

    for line in sys.stdin:
        command = json.loads(line)
        batch = len(command["prompts"])
        if batch not in fastest:
            fastest[batch] = min(
                models, key=lambda model: min(run(model, command, 8)[0] for _ in range(3))
            )
        cpu, tokens = run(fastest[batch], command, command["new"])
        print(json.dumps({"cpu": cpu, "tokens": tokens}), flush=True)


def delta_rule(inputs_file, results_file):
    """Writes o and the gradients of q, k, v, g, beta for the cotangent do; then times forward +
    backward on request.
    """
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    x = load_file(inputs_file)
    do = x.pop("do")
    names = ("q", "k", "v", "g", "beta")
    q, k, v, g, beta = leaves = [x[name].requires_grad_() for name in names]

    def run():
        start = time.perf_counter()
        for leaf in leaves:
            leaf.grad = None
        wide = lambda y: y.repeat_interleave(v.shape[2] // q.shape[2], dim=2)
        o, _ = torch_chunk_gated_delta_rule(
            wide(q), wide(k), v, g=g, beta=beta, use_qk_l2norm_in_kernel=True
        )
        o.backward(do)
        return time.perf_counter() - start, o

    _, o = run()
    save_file(
        {"o": o.detach().contiguous()}
        | {"d" + n: y.grad.contiguous() for n, y in zip(names, leaves)},
        results_file,
    )
    print(
        json.dumps({"transformers": transformers.__version__, "torch": torch.__version__}),
        flush=True,
    )
    for line in sys.stdin:
        print(json.dumps([run()[0] for _ in range(json.loads(line)["runs"])]), flush=True)


if __name__ == "__main__":
    {
        command.__name__: command
        for command in (
            logits,
            kimi_reference,
            qwen4_reference,
            olmo_hybrid_reference,
            train,
            generate,
            delta_rule,
        )
    }[sys.argv[1]](*sys.argv[2:])
