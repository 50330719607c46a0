"""Sources of the training data: their names, weights and fields as users write them."""

import pytest

from qwen3next_jax.common.errors import UserError
from qwen3next_jax.config import DataConfig

NAMED = "web=a/*.jsonl, code=b, c"


def test_a_source_has_a_name_or_its_glob():
    sources = DataConfig(path=NAMED + ",hf://x/y=z,./year=1").sources
    assert [(source.name, source.glob) for source in sources] == [
        ("web", "a/*.jsonl"),
        ("code", "b"),
        ("c", "c"),
        ("hf://x/y=z", "hf://x/y=z"),
        ("./year=1", "./year=1"),
    ]


def test_weights_by_name_follow_the_sources():
    by_name = DataConfig(path=NAMED, weights="c=1,web=3,code=0")
    assert by_name.source_weights == DataConfig(path=NAMED, weights="3,0,1").source_weights
    assert DataConfig(path=NAMED).source_weights == ()


def test_spaces_around_equals_are_ignored():
    spaced = DataConfig(path=NAMED, weights="c = 1, web =3,code= 0", text_field="code = content")
    assert spaced.source_weights == (3.0, 0.0, 1.0)
    assert [source.text_field for source in spaced.sources] == ["text", "content", "text"]


def test_fields_by_name_leave_others_their_default():
    config = DataConfig(path=NAMED, text_field="code=content", messages_field="web=chat.turns")
    assert [(s.text_field, s.messages_field) for s in config.sources] == [
        ("text", "chat.turns"),
        ("content", ""),
        ("text", ""),
    ]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"path": "web=a,web=b"}, ["'web'"]),
        ({"path": "web=a,web"}, ["two sources 'web'"]),
        ({"path": "web=,b"}, ["'web' has no files"]),
        ({"text_field": "0=x"}, ["no source '0'"]),
        ({"weights": (3.0, 1.0)}, ["expected a text"]),
        ({"weights": "web=1,code=1"}, ["'c'"]),
        ({"weights": "web=1,cod=1,c=1"}, ["'cod'", "'code'"]),
        ({"weights": "web=1,web=2,code=1,c=1"}, ["two values", "'web'"]),
        ({"weights": "web=1,2,3"}, ["a name for each"]),
        ({"weights": "1,2"}, ["2 values for 3 sources"]),
        ({"weights": "3"}, ["1 value for 3 sources"]),
        ({"weights": "1,2,x"}, ["'x'"]),
        ({"weights": "1,2,-1"}, ["'-1'"]),
        ({"weights": "1,2,nan"}, ["'nan'"]),
        ({"weights": "0,0,0"}, ["above 0"]),
        ({"text_field": "a,b"}, ["data.text_field", "2 values for 3 sources"]),
        ({"messages_field": "books=m"}, ["data.messages_field", "'books'"]),
    ],
)
def test_a_value_for_no_source_is_refused(settings, names):
    with pytest.raises(UserError) as raised:
        DataConfig(**{"path": NAMED} | settings)
    assert all(name in str(raised.value) for name in names)
