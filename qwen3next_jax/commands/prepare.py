"""Prepares the data of a run before it starts: tokenizes the files of data.path and packs their
tokens into rows. The command needs no accelerator and does not load JAX.

    qwen3next prepare --config=configs/tiny.py [--workers=N] [--rank=I --of=N]

Finished rows are kept in data.prepared_dir, from which `train.py` reads them. If the command is
killed, the same command continues. Several hosts that share data.prepared_dir can prepare the data
together: each host runs this command with its own --rank (from 0) and the same --of. If a host
dies, the files on which it worked are missing; then run the command again, with any number of
hosts.
"""

import dataclasses

from absl import flags

from qwen3next_jax.commands import config_flags
from qwen3next_jax.common.errors import ExitCode, UserError, escape_control

get_config = config_flags.define_config_flag()
_workers = flags.DEFINE_integer(
    "workers", None, "processes of this host that work at once (default: its cores)", lower_bound=1
)
_rank = flags.DEFINE_integer("rank", 0, "which of the hosts this one is, from 0", lower_bound=0)
_of = flags.DEFINE_integer("of", 1, "number of hosts that prepare together", lower_bound=1)


def main() -> int:
    from qwen3next_jax.data.pipeline import TextData, data_source_class, find_sources
    from qwen3next_jax.data.preparation import (
        RowRecipe,
        Share,
        Unfinished,
        prepare,
    )
    from qwen3next_jax.data.progress import PreparationProgress
    from qwen3next_jax.runs.facts import with_tokenizer
    from qwen3next_jax.training.stages import resolve_stages

    if _rank.value >= _of.value:
        raise UserError(
            f"--rank={_rank.value} --of={_of.value}: expected a rank from 0 to {_of.value - 1}"
        )
    config = get_config()
    data = with_tokenizer(config.data, config.train.init_from)
    config = dataclasses.replace(config, data=data)
    share = Share(_rank.value, _of.value)
    # Stages that differ only in other settings share their rows.
    stages = {(stage.data, stage.sequence_length) for stage in resolve_stages(config)}
    stages = sorted(stages, key=lambda stage: stage[1])
    for data, length in stages:
        kind = data_source_class(data)
        if not issubclass(kind, TextData):
            raise UserError(
                f"data.source = {data.source!r}: its rows are made while they are read: there is "
                "nothing to prepare"
            )
        tokenizer = kind.tokenizer_of(data, config.model.vocab_size)
        recipe = RowRecipe(length, data.heldout_fraction, data.seed)
        try:
            with PreparationProgress() as progress:
                prepared = prepare(
                    find_sources(data, tokenizer),
                    tokenizer,
                    recipe,
                    data.prepared_dir,
                    progress,
                    _workers.value,
                    share,
                )
        except Unfinished as error:
            print(
                f"the share of rank {share.rank} is done; {error.missing} of {error.parts} parts, "
                "of other ranks, are missing: the last rank to end packs the rows, or this command "
                "once more, with all ranks together"
            )
            continue
        for one in prepared:
            total = one.total_statistics
            in_loss = f" ({total.tokens - total.ignored:,} in the loss)" if total.ignored else ""
            blank = f", {one.empty_documents:,} blank texts left out" if one.empty_documents else ""
            fit = f"; {one.long_conversations_note}" if one.long_conversations_note else ""
            line = (
                f"{one.source.name}: {total.documents:,} documents, {total.tokens:,} tokens"
                f"{in_loss}{blank}, {total.rows:,} rows of {length}{fit}; "
                f"fingerprint {one.fingerprint}"
            )
            print(escape_control(line))
    return ExitCode.DONE
