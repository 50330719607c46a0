"""The families of Hugging Face checkpoints that this project reads and writes, one file each."""

from qwen3next_jax.common.errors import UserError, did_you_mean, short_repr
from qwen3next_jax.interop.families import (
    kimi_linear,
    olmo_hybrid,
    qwen3_5,
    qwen3_next,
    qwen4_exp,
)
from qwen3next_jax.interop.families.form import Fields, Form

# Value of `model.hf_form` → the form.
FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        qwen3_next.FORM,
        qwen3_5.WRAPPER,
        qwen3_5.TEXT,
        kimi_linear.FORM,
        olmo_hybrid.FORM,
        qwen4_exp.WRAPPER,
        qwen4_exp.TEXT,
    )
}


def form_of_config(fields: Fields, where: str) -> Form:
    """Returns the form (`form.Form`) of the model that a config.json with these fields describes.
    The `model_type` determines the form.

    Raises:
      UserError: the `model_type` is unknown. The message begins with `where`, the file's name.
    """
    model_type = fields.get("model_type")
    model_types = {name: form for form in FORMS.values() for name in form.model_types}
    if isinstance(model_type, str) and model_type in model_types:
        return model_types[model_type]
    guess = did_you_mean(model_type, model_types) if isinstance(model_type, str) else ""
    raise UserError(
        f"{where}: model_type = {short_repr(model_type)}: "
        f"expected one of {', '.join(model_types)}, the families that this project reads{guess}"
    )
