"""Where the norms of a block stand: subclasses of the block that norms what its mixer and its
MLP read.
"""

import jax

from qwen3next_jax.model.block import Block
from qwen3next_jax.model.layers import rms_norm


class Post(Block):
    """N(x + f(x)), as the Transformer has it (1706.03762)."""

    def before(self, x_BTD, part):
        return x_BTD

    def after(self, x_BTD, y_BTD, part):
        return super().before(x_BTD + y_BTD, part)


class Olmo2(Post):
    """x + N(f(x)) (2501.00656)."""

    def after(self, x_BTD, y_BTD, part):
        return x_BTD + Block.before(self, y_BTD, part)


class Sandwich(Block):
    """x + N'(f(N(x))) (2105.13290; Gemma 3)."""

    def __init__(self, config, mixer, sparse, make, layers):
        super().__init__(config, mixer, sparse, make, layers)
        self.after_mixer_norm, self.after_mlp_norm = (
            make.norm(config.hidden_size) for _ in range(2)
        )

    def after(self, x_BTD, y_BTD, part):
        return x_BTD + rms_norm(y_BTD, getattr(self, f"after_{part}_norm")[...], self.config)


class Deep(Post):
    """DeepNorm (2203.00555): N(α x + f(x)), α = (2 L)^¼ of L layers; matrices of MLPs, of values
    and of outputs start smaller by β = (8 L)^-¼. Slabs that hold values beside queries and keys
    start as they do.
    """

    def __init__(self, config, mixer, sparse, make, layers):
        super().__init__(config, mixer, sparse, make, layers)
        self.alpha, beta = (
            (2 * config.num_hidden_layers) ** 0.25,
            (8 * config.num_hidden_layers) ** -0.25,
        )
        smaller = [
            ("v_proj", self.mixer),
            ("value_proj", self.mixer),
            ("o_proj", self.mixer),
            ("out_proj", self.mixer),
        ]
        smaller += [(name, self.mlp) for name in vars(self.mlp)]
        for owner, name in ((owner, name) for name, owner in smaller if hasattr(owner, name)):
            parameter = getattr(owner, name)
            if getattr(getattr(parameter, "declared", None), "kind", None) == "matrix":
                setattr(owner, name, parameter.replace(parameter[...] * beta))

    def after(self, x_BTD: jax.Array, y_BTD: jax.Array, part: str) -> jax.Array:
        return super().after(self.alpha * x_BTD, y_BTD, part)
