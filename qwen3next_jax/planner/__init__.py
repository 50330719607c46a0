"""The planner: compiles the train step for a described TPU slice that is not there; memory,
network and time per step.
"""
