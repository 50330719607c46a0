"""The group `model.mixer`: values that the mixers of the model declare.

python tests/zoo/test_mixer_settings.py writes the tables of docs/mixers.md anew.
"""

import dataclasses
import json
import pathlib
import re
import sys
from typing import Annotated

import pytest

from qwen3next_jax.config import Config, MixerConfig, ModelConfig, from_dict, to_dict
from qwen3next_jax.config.bounds import check_declared_bounds
from qwen3next_jax.config.describe import settings_by_mixer
from qwen3next_jax.config.files import apply_overrides
from qwen3next_jax.config.registry import MIXERS
from qwen3next_jax.model.gated_attention import GatedAttention
from qwen3next_jax.model.layer_properties import mixer_class
from tests.refusals import refused


def model(mixer="sliding_window", **settings):
    return ModelConfig(linear_mixer=mixer, mixer=MixerConfig(**settings))


def test_equal_models_have_equal_settings():
    """Defaults are dropped, whole numbers become the setting's type, and JSON gives them back."""
    assert model(window=1024, first_tokens=0) == model()
    assert model(window=8) == model(window=8, sink_logit=False) != model(window=9)
    assert model("leaky_rerope", stretch=4).mixer["stretch"] == 4.0
    config = Config(model=model(window=8, sink_logit=True))
    again = from_dict(Config, json.loads(json.dumps(to_dict(config))))
    assert again == config
    assert hash(again.model) == hash(config.model)
    assert again.model.settings_of_mixer("sliding_window").window == 8


def test_a_flag_is_of_the_type_that_the_mixer_declares(tmp_path, monkeypatch):
    """Also of a mixer that no registry knows, as its user wrote it."""
    (tmp_path / "own.py").write_text(
        "import dataclasses\n"
        "from qwen3next_jax.model.mixer import Mixer\n"
        "class Own(Mixer):\n"
        "    @dataclasses.dataclass(frozen=True)\n"
        "    class Settings:\n"
        "        own_rate: float = 1.0\n"
        "        own_name: str = ''\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    values = {"model": {"linear_mixer": "own:Own"}}
    given = {"own_rate": "3", "own_name": "5"}
    apply_overrides(values, [(f"model.mixer.{name}", text) for name, text in given.items()])
    config = from_dict(Config, values)
    assert dict(config.model.mixer) == {"own_rate": 3.0, "own_name": "5"}
    values["model"]["linear_mixer"] = "gated_deltanet"
    with refused("model.mixer.own_name = '5'"):
        from_dict(Config, values)


@pytest.mark.parametrize(
    "mixer, settings, names",
    [
        ("gated_deltanet", {"window": 8}, ("window = 8", "sliding_window", "1024")),
        ("sliding_window", {"windw": 8}, ("windw = 8", "'window'")),
        ("sliding_window", {"window": "8"}, ("window = '8'",)),
        ("sliding_window", {"window": 0}, ("window = 0", "1")),
    ],
)
def test_a_value_that_no_mixer_takes(mixer, settings, names):
    mixer_class("sliding_window")  # is there, or the test is skipped
    with refused(*names):
        model(mixer, **settings)


def test_a_bound_that_is_not_known_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Settings:
        rate: Annotated[float, "more than 0"] = 1.0

    with refused("Settings.rate"):
        check_declared_bounds(Settings(), "model.mixer")


@pytest.mark.parametrize("name", MIXERS)
def test_what_a_mixer_says_of_its_settings_is_so(name):
    mixer = mixer_class(name)
    names = {field.name for field in dataclasses.fields(mixer.Settings)}
    assert set(mixer.settings_free_after_training) <= names
    if (
        mixer.loads_weights_of is not None
    ):  # it then reads all that gives those weights their meaning
        others = {field.name for field in dataclasses.fields(mixer.loads_weights_of.Settings)}
        assert mixer.loads_weights_of is GatedAttention
        assert names - set(mixer.settings_free_after_training) == others


# ---- the page
# --------------------------------------------------------------------------------------------------

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "mixers.md"


WORDS = 40  # of a mixer's description on the page
BEGIN, END = "<!-- {} -->\n", "<!-- end of {} -->"


def settings() -> str:
    """Every setting with its default, what it may be, its meaning and the mixers that read it."""
    readers = {}
    for mixer, own in settings_by_mixer().items():
        for setting in own:
            readers.setdefault(setting, []).append(f"`{mixer}`")
    rows = ["| setting | default | expected | meaning | mixers |", "|---|---|---|---|---|"]
    for setting, mixers in sorted(readers.items(), key=lambda item: item[0].name):
        name, default, allowed, meaning = setting
        allowed = allowed or {bool: "True, False", int: "a whole number"}[type(default)]
        rows.append(f"| `{name}` | {default} | {allowed} | {meaning} | {', '.join(mixers)} |")
    return "\n".join(rows) + "\n"


def mixers() -> str:
    """Every mixer with the beginning of its docstring, its sources and its file."""
    rows = ["| mixer | what it is | memory | source | file |", "|---|---|---|---|---|"]
    for name in MIXERS:
        mixer = mixer_class(name)
        doc = " ".join(mixer.__doc__.partition("\n\n")[0].split())
        sentences = re.split(r"(?<=\.) (?=[A-Z`])", doc)
        text = sentences[0]
        for sentence in sentences[1:]:
            if len(f"{text} {sentence}".split()) > WORDS:
                break
            text += f" {sentence}"
        module = sys.modules[mixer.__module__]
        number = r"\b\d{4}\.\d{4,5}\b"
        found = re.findall(number, mixer.__doc__) or re.findall(number, module.__doc__ or "")
        sources = [f"[{n}](https://arxiv.org/abs/{n})" for n in dict.fromkeys(found[:2])]
        memory = "constant" if mixer.cache_kind == "state" else "grows"
        file = "/".join(mixer.__module__.split(".")[1:]) + ".py"
        link = f"[{file}](../qwen3next_jax/{file})"
        text = text.replace("|", "\\|")
        rows.append(f"| `{name}` | {text} | {memory} | {', '.join(sources)} | {link} |")
    return "\n".join(rows) + "\n"


def page() -> str:
    """The page with the tables as they are now."""
    text = PAGE.read_text()
    for name, table in {"mixers": mixers(), "settings": settings()}.items():
        before, _, after = text.partition(BEGIN.format(name))
        after = after.partition(END.format(name))[2]
        text = before + BEGIN.format(name) + "\n" + table + "\n" + END.format(name) + after
    return text


def test_the_page_lists_all_mixer_settings():
    mixer_class("sliding_window")  # is there, or the test is skipped
    assert all(setting.meaning for own in settings_by_mixer().values() for setting in own)
    assert page() == PAGE.read_text(), "python tests/zoo/test_mixer_settings.py writes the tables"


if __name__ == "__main__":
    PAGE.write_text(page())
