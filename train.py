"""Trains Qwen3-Next: `python train.py --config=configs/tiny.py [--workdir=…] [--config.train.steps=…] [--max-restarts=N]`."""

from qwen3next_jax import cli, supervisor

get_config = cli.define_config_flag()
get_launch = cli.define_launch_flags()
get_workdir = cli.define_workdir_flag(default_from_config=True)
get_max_restarts = supervisor.define_flag()


def main() -> int:
    config, launch = get_config(), get_launch()
    if get_max_restarts():
        return supervisor.supervise(get_workdir(config.name), get_max_restarts())
    from qwen3next_jax.data.pipeline import source_of  # each import when its turn comes: a mistake should not wait for JAX

    source_of(config.data).check(config.data, config.train.sequence_length, config.model.vocab_size)
    cli.enable_compilation_cache()
    from qwen3next_jax.parallel import distributed
    with distributed.joined(launch, config):
        from qwen3next_jax.training.loop import train

        return train(config, get_workdir(config.name))


if __name__ == "__main__":
    cli.run(main)
