"""The old places of mixers' base classes, for mixers outside this package."""
