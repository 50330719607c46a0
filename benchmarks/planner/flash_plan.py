"""What a training step of Qwen3.8-Flash-Next costs on a TPU slice, part by part, beside
Qwen3-Next's: by arithmetic, and by compiled layers where docs/planner/flash has them.

    python benchmarks/planner/flash_plan.py [--compile=NAME,…|all] [--plans=docs/planner/flash]

The arithmetic takes the larger of a part's products at the chip's peak and its bytes at the peak of
HBM; the function of each part says how often which arrays go through HBM. A step with
`remat = "block"` runs the products of a layer four times: forward, again in the backward pass, and
twice for the gradients. The network is not counted.

`--compile` compiles layers (`block_plan.py`), which takes minutes each. A layer's time in a step is
half of that of a loop of two layers. The step of 48 layers is extended from them: 36 recurrent
layers, 12 of attention and one more for multi-token prediction, and by arithmetic the head (twice,
with multi-token prediction), the n-gram table and the optimizer. No TPU takes part.
"""

import json
import pathlib
import subprocess
import sys

from benchmarks import harness
from qwen3next_jax.config import ModelConfig
from qwen3next_jax.model.flops import forward_flops_per_token, parameter_counts
from qwen3next_jax.sharding.chips import CHIPS, Chip

FLASH, NEXT = "qwen3_8_flash_next", "qwen3_next_80b_a3b"
REMAT_RUNS = 4  # of a layer's products: forward, recomputed, and two for the gradients
# name: slice, mesh, tokens of a row, rows on a device, devices that share a row (axis `tensor`)
SETTINGS = {
    "v5p_16k": ("v5p:8x8x16", "data=128,expert=8", 16_384, 1),
    "v5p_256k": ("v5p:8x8x16", "data=16,expert=8,tensor=8", 262_144, 8),
    "tpu7x_16k": ("tpu7x:4x8x8", "data=64,expert=8", 16_384, 1),
    "tpu7x_256k": ("tpu7x:4x8x8", "data=8,expert=8,tensor=8", 262_144, 8),
}
MIXERS = {FLASH: ("gated_deltanet", "qsa"), NEXT: ("gated_deltanet", "gated_attention")}
# Passes over the streams of a block, forward and backward with what the backward recomputes, as
# benchmarks/planner/residual_plan.py counts arrays as large as the streams: in XLA alone, and with
# the kernels; and the fewest that the formulas need: forward 3, recomputed 1, backward 4 (read the
# streams, read and write their gradient, read the gradient for the mix).
PASSES_XLA, PASSES_KERNELS, PASSES_FLOOR = 30.3, 13.0, 8.0


def main() -> int:
    parser = harness.arguments(__doc__)
    parser.add_argument("--plans", type=pathlib.Path, default=harness.ROOT / "docs/planner/flash")
    parser.add_argument("--compile", default="", help="names of layers, or all")
    args = parser.parse_args()
    layers = {
        f"{setting}_{config}_{mixer}": (setting, config, mixer)
        for setting in SETTINGS
        for config, mixers in MIXERS.items()
        for mixer in mixers
    }
    names = list(layers) if args.compile == "all" else [n for n in args.compile.split(",") if n]
    if unknown := [name for name in names if name not in layers]:
        parser.error(f"--compile: no layer {', '.join(unknown)}; known: all, {', '.join(layers)}")
    for name in names:
        _compile(*layers[name], args.plans / f"{name}.json")
    for setting in SETTINGS:
        _print_arithmetic(setting)
    for setting in SETTINGS:
        for config in MIXERS:
            _print_compiled(setting, config, args.plans)
    return 0


def _compile(setting: str, config: str, mixer: str, out: pathlib.Path) -> None:
    slice_, mesh, length, tensor = SETTINGS[setting]
    out.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            sys.executable,
            str(harness.ROOT / "benchmarks/planner/block_plan.py"),
            f"--config=configs/{config}.py",
            f"--topology={slice_}",
            f"--mesh={mesh}",
            f"--tokens={length // tensor}",
            f"--mixer={mixer}",
            f"--json={out}",
        ],
        cwd=harness.ROOT,
        check=True,
    )


def _model(name: str) -> ModelConfig:
    path = harness.ROOT / "configs" / f"{name}.py"
    return harness.load_config(path).model


class Device:
    """A device of a slice, with the rows that it works on.

    Attributes:
      length: tokens of a row.
      tensor: number of devices that share a row, by heads and by tokens.
      devices: devices of the slice.
    """

    def __init__(self, setting: str):
        slice_, _, self.length, self.tensor = SETTINGS[setting]
        name, _, grid = slice_.partition(":")
        self.chip: Chip = CHIPS[name]
        chips = 1
        for side in grid.split("x"):
            chips *= int(side)
        self.devices = chips * self.chip.devices_per_chip
        self.tokens = self.length // self.tensor

    def seconds(self, flops: float, size: float = 0.0) -> float:
        """Returns the seconds of `flops` products and `size` bytes through HBM, at the peaks."""
        bandwidth = self.chip.hbm_bandwidth / self.chip.devices_per_chip
        return max(flops / self.chip.device_flops, size / bandwidth)


def streams(m: ModelConfig, d: Device, passes: float) -> float:
    """Passes over bfloat16 streams [tokens, S · D], two blocks a layer."""
    size = d.tokens * m.streams.hc_count * m.hidden_size * 2
    return 2 * (m.num_hidden_layers + m.mtp_depth) * d.seconds(0, passes * size)


def _attention_layers(m: ModelConfig, mixer: str) -> int:
    return sum(name == mixer for name in m.mixers) + m.mtp_depth


def _pairs(m: ModelConfig, d: Device) -> float:
    """Products of one matrix of attention, over all causal pairs of a row, on one device."""
    return d.length**2 * m.num_attention_heads * m.head_dim / d.tensor


def attention_dense(m: ModelConfig, d: Device) -> float:
    """Causal attention that never writes scores to HBM: two products over the pairs forward, again
    in the backward pass, and five for the gradients (the scores, and four gradients' products).
    """
    return _attention_layers(m, m.mixers[-1]) * d.seconds((2 + 2 + 5) * _pairs(m, d))


def qsa_masked(m: ModelConfig, d: Device) -> float:
    """All pairs, not the causal half, with float32 scores that go through HBM: written and read
    three times forward (scores, softmax, product), as often recomputed twice (the chunk, and the
    layer), and as often for their gradients.
    """
    flops = 2 * (2 + 2 + 2 + 4) * _pairs(m, d)
    scores = d.length**2 * m.num_attention_heads / d.tensor * 4
    return _attention_layers(m, "qsa") * d.seconds(flops, scores * 6 * 4)


def qsa_kernels(m: ModelConfig, d: Device) -> float:
    """The TPU kernels: two products over the causal pairs forward, which remat = "block" saves, and
    seven in the backward pass (three for queries, four for keys and values). The indexer's scores
    of all causal pairs are computed by each of the three attention kernels, and of the blocks once
    for the choice, by every shard of `tensor`. The counts of the choice are no products.
    """
    s = m.settings_of_mixer("qsa")
    index = d.length**2 * s.indexer_n_heads * s.indexer_head_dim
    flops = (2 + 3 + 4) * _pairs(m, d) + (3 + 1 / s.indexer_compress_ratio) * index
    return _attention_layers(m, "qsa") * d.seconds(flops)


def qsa_gathered(m: ModelConfig, d: Device) -> float:
    """Keys and values of the selected tokens of each query, gathered: read, written, and read by
    the product, in the forward pass, its recomputation and the backward pass; and in the backward
    pass float32 gradients, written, read, and added to the keys' (read and written). With more
    shards of `tensor` than key/value heads, each query head has its own copy.
    """
    s = m.settings_of_mixer("qsa")
    heads = max(m.num_key_value_heads / d.tensor, 1)
    if m.num_key_value_heads % d.tensor:
        heads = m.num_attention_heads / d.tensor
    gathered = d.length * (s.indexer_budget + s.indexer_compress_ratio) * heads * m.head_dim * 2
    size = gathered * (2 * 3 * 3 + 4 * 4)
    flops = (2 + 2 + 5) * 2 * d.length * s.indexer_budget * m.num_attention_heads * m.head_dim
    return _attention_layers(m, "qsa") * d.seconds(flops / d.tensor, size)


def qsa_scores(m: ModelConfig, d: Device) -> float:
    """The indexer's products with the blocks of all earlier tokens, forward and recomputed. Every
    shard of `tensor` computes all of them. The selection itself is not counted.
    """
    s = m.settings_of_mixer("qsa")
    pairs = d.length**2 / 2 / s.indexer_compress_ratio
    flops = 2 * 2 * pairs * s.indexer_n_heads * s.indexer_head_dim
    return _attention_layers(m, "qsa") * d.seconds(flops)


def table_rows(m: ModelConfig, d: Device) -> float:
    """The rows of the tokens: read and written in bfloat16 at both ends of the exchange, and their
    float32 gradients as often.
    """
    numbers = len(m.ple.layer_ids) * d.tokens * m.ple.embed_dim
    return d.seconds(0, numbers * (2 + 4) * 4)


def table_lazy(m: ModelConfig, d: Device) -> float:
    """Lazy AdamW of the rows of the tokens, each used once: three float32 arrays read and written,
    and the gradient read.
    """
    return d.seconds(0, len(m.ple.layer_ids) * d.tokens * m.ple.embed_dim * 7 * 4)


def table_dense(m: ModelConfig, d: Device) -> float:
    """AdamW of the whole table, split over all devices; and its gradient, written as zeros."""
    rows = sum(m.ple.table_rows(number) for number in range(len(m.ple.layer_ids)))
    return d.seconds(0, rows * m.ple.head_width / d.devices * 8 * 4)


def optimizer(m: ModelConfig, d: Device) -> float:
    """AdamW of everything but the table."""
    table = (
        sum(m.ple.table_rows(number) for number in range(len(m.ple.layer_ids))) * m.ple.head_width
    )
    return d.seconds(0, (parameter_counts(m).total - table) / d.devices * 7 * 4)


def head(m: ModelConfig, d: Device) -> float:
    """The output head and its loss, for the next token and for multi-token prediction."""
    flops = REMAT_RUNS * 2 * d.tokens * m.hidden_size * m.vocab_size
    return (1 + m.mtp_depth) * d.seconds(flops)


def _products(m: ModelConfig, d: Device, parts: tuple[str, ...]) -> float:
    flops = forward_flops_per_token(m, d.length)
    of_parts = sum(flops.get(part, 0.0) for part in parts)
    return d.seconds(REMAT_RUNS * of_parts * d.tokens)


def _print_arithmetic(setting: str) -> None:
    d = Device(setting)
    flash, other = _model(FLASH), _model(NEXT)
    slice_, mesh, *_ = SETTINGS[setting]
    print(
        f"\n{slice_}, {mesh}, rows of {d.length:,} tokens, {d.tokens:,} tokens a device, "
        f"milliseconds of a step by arithmetic\n"
    )
    harness.print_header("part", "Qwen3.8-Flash-Next", "Qwen3-Next")
    both = lambda f, *rest: (f(flash, d, *rest), f(other, d, *rest))
    rows = {
        "routed and shared experts, routers": both(_products, ("experts", "mlp", "router")),
        "Gated DeltaNet": both(_products, ("gated_deltanet",)),
        "head and loss": both(head),
        "streams, as XLA compiles them": (streams(flash, d, PASSES_XLA), None),
        "streams, with the kernels": (streams(flash, d, PASSES_KERNELS), None),
        "streams, at the fewest passes": (streams(flash, d, PASSES_FLOOR), None),
        "attention to all keys, scores in on-chip memory": (
            attention_dense(flash, d),
            attention_dense(other, d),
        ),
        "QSA under a mask, scores through HBM": (qsa_masked(flash, d), None),
        "QSA by the kernels": (qsa_kernels(flash, d), None),
        "QSA, keys gathered": (qsa_gathered(flash, d), None),
        "QSA, the indexer's scores": (qsa_scores(flash, d), None),
        "n-gram table: rows and their gradients": (table_rows(flash, d), None),
        "n-gram table: lazy AdamW": (table_lazy(flash, d), None),
        "n-gram table: AdamW": (table_dense(flash, d), None),
        "AdamW of the rest": both(optimizer),
    }
    for name, (of_flash, of_other) in rows.items():
        second = "" if of_other is None else f"{1e3 * of_other:,.1f}"
        harness.print_row(name, f"{1e3 * of_flash:,.1f}", second)


def _print_compiled(setting: str, config: str, plans: pathlib.Path) -> None:
    """Prints the extension of the compiled layers to the model, if both kinds were compiled."""
    paths = {mixer: plans / f"{setting}_{config}_{mixer}.json" for mixer in MIXERS[config]}
    if not all(path.exists() for path in paths.values()):
        return
    m, d = _model(config), Device(setting)
    records = {mixer: json.loads(path.read_text()) for mixer, path in paths.items()}
    counts = {mixer: m.mixers.count(mixer) for mixer in paths}
    counts[MIXERS[config][1]] += m.mtp_depth
    rest = head(m, d) + optimizer(m, d)
    if m.ple.layer_ids:
        rest += table_rows(m, d) + table_lazy(m, d)
    slice_, mesh, *_ = SETTINGS[setting]
    print(f"\n{config}, {slice_}, {mesh}, rows of {d.length:,} tokens: compiled layers, extended")
    for cost_model in next(iter(records.values()))["estimates"]:
        parts, total = {}, rest
        for mixer, record in records.items():
            estimate = record["estimates"][cost_model]
            scale = counts[mixer] / record["layers_in_all"]
            total += scale * estimate["seconds"]
            for name, cost in estimate["parts"].items():
                file = name.split()[0]
                parts[file] = parts.get(file, 0.0) + scale * cost["seconds"]
        largest = sorted(parts.items(), key=lambda item: -item[1])[:8]
        print(
            f"{cost_model}: {total:.3g} s a step ("
            + ", ".join(
                f"{counts[mixer]} × {mixer} "
                f"{1e3 * r['estimates'][cost_model]['seconds'] / r['layers_in_all']:.1f} ms"
                for mixer, r in records.items()
            )
            + f", the rest {rest:.3g} s); largest: "
            + ", ".join(f"{name} {1e3 * seconds:,.0f} ms" for name, seconds in largest)
        )


if __name__ == "__main__":
    sys.exit(main())
