"""lm-evaluation-harness on our model against transformers' on the same export: every request's
answer, one by one.

    uv run --extra evals python benchmarks/evals/harness_parity.py --python=PATH_TO_A_PYTHON
    [--model=HF_DIRECTORY]

`--python`: an interpreter with torch, transformers and lm-eval. `--model`: default a small
random model, exported on the spot. The tasks are local (tests/fixtures/harness): multiple
choice, rolling log-likelihood, generation. Prints the largest difference of log-likelihoods per
task, and exits with 1 where one is above 1e-3 nats or a greedy answer differs.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

# The interpreter with torch does not have this project.
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from benchmarks import harness

TASKS = ["local_choice", "local_perplexity", "local_generate"]
FOLDER = harness.ROOT / "tests" / "fixtures" / "harness"
# nats per request; logits of both agree within 1e-4 and a request sums up to a hundred tokens
BAR = 1e-3
MAX_LENGTH = 64  # short, so that the rolling windows and the cut of long contexts are at work


def evaluate(model) -> dict[str, list]:
    """Task → the model's answers in the order of the documents."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    os.chdir(FOLDER)  # the tasks name their data from here
    results = lm_eval.simple_evaluate(
        model, tasks=TASKS, task_manager=TaskManager(include_path=str(FOLDER)), bootstrap_iters=0
    )
    return {
        task: [
            [response[0] for response in sample["resps"]]
            for sample in sorted(results["samples"][task], key=lambda s: s["doc_id"])
        ]
        for task in TASKS
    }


def theirs(path: str) -> None:
    import torch
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    # Its cache takes two windows of the same tokens for one, though they may ask for a different
    # number of them: texts that end alike then get each other's sums (several nats off).
    print(
        json.dumps(
            evaluate(
                HFLM(
                    pretrained=model,
                    tokenizer=AutoTokenizer.from_pretrained(path),
                    max_length=MAX_LENGTH,
                    batch_size=4,
                    logits_cache=False,
                )
            )
        )
    )


def ours(path: str) -> dict[str, list]:
    from qwen3next_jax.evals.harness import HarnessModel
    from qwen3next_jax.trained.load import load_model

    model, tokenizer, *_ = load_model(path)
    return evaluate(HarnessModel(model, tokenizer, MAX_LENGTH, batch_size=4))


def random_model(path: pathlib.Path) -> None:
    from flax import nnx

    from qwen3next_jax.config import ModelConfig
    from qwen3next_jax.data.tokens import load_tokenizer
    from qwen3next_jax.interop.huggingface import save_hf
    from qwen3next_jax.model import Qwen3Next

    config = ModelConfig(
        vocab_size=257,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        mtp_depth=0,
        dtype="float32",
        decay_init="log_uniform",
        max_position_embeddings=256,
        eos_token_id=256,
        initializer_range=0.1,
    )
    save_hf(Qwen3Next(config, rngs=nnx.Rngs(0)), path, load_tokenizer("bytes"))


def main() -> int:
    parser = harness.arguments(__doc__)
    parser.add_argument("--python", required=True)
    parser.add_argument("--model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        path = str(
            pathlib.Path(arguments.model).absolute()
            if arguments.model
            else pathlib.Path(temporary) / "model"
        )
        if not arguments.model:
            random_model(pathlib.Path(path))
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
        peer = subprocess.run(
            [arguments.python, __file__, "--theirs", path],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        if peer.returncode:
            sys.exit(f"{arguments.python} failed: it needs torch, transformers and lm-eval")
        answers = {
            "transformers": json.loads(peer.stdout.splitlines()[-1]),
            "ours": json.loads(json.dumps(ours(path))),
        }
    worst = 0.0
    for task in TASKS:
        pairs = [
            (a, b)
            for left, right in zip(
                answers["ours"][task], answers["transformers"][task], strict=True
            )
            for a, b in zip(left, right, strict=True)
        ]
        if task == "local_generate":
            differing = sum(a != b for a, b in pairs)
            print(f"{task}: {len(pairs)} generations, {differing} differ")
        else:
            values = [(a[0], b[0]) if isinstance(a, list) else (a, b) for a, b in pairs]
            differing = sum(a[1] != b[1] for a, b in pairs if isinstance(a, list))
            difference = max(abs(float(a) - float(b)) for a, b in values)
            print(
                f"{task}: {len(pairs)} requests, largest difference {difference:.1e} nats of "
                f"{max(abs(float(b)) for _, b in values):.0f}, {differing} greedy flags differ"
            )
            worst = max(worst, difference)
        worst = max(worst, BAR * 2 * differing)
    return int(worst > BAR)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--theirs"]:
        theirs(sys.argv[2])
    else:
        sys.exit(main())
