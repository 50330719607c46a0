"""Evaluates a run on its held-out text: `python eval.py --workdir=runs/tiny [--config=configs/tiny.py]`.

Without `--config` the run's own configuration holds; one that is given may name other data.
"""

from qwen3next_jax import cli

get_config = cli.define_config_flag()
get_workdir = cli.define_workdir_flag(default_from_config=True)


def main() -> int:
    config = get_config(required=False)
    cli.enable_compilation_cache()
    from qwen3next_jax.evaluate import evaluate  # after the flags: a mistyped flag should not wait for JAX

    return evaluate(config, get_workdir(config.name if config else None))


if __name__ == "__main__":
    cli.run(main)
