"""What a program that JAX traced does."""

import jax


def operations(jaxpr, name: str) -> list:
    """The operations of a traced program that are called `name`, also those inside of other
    operations.
    """
    found = []
    for operation in jaxpr.eqns:
        if operation.primitive.name == name:
            found.append(operation)
            continue
        is_program = lambda value: hasattr(value, "eqns")
        for inner in jax.tree.leaves(list(operation.params.values()), is_leaf=is_program):
            if is_program(inner):
                found += operations(inner, name)
    return found
