"""The planner: compiles the train step for a TPU slice that exists only as a description, and
predicts memory, network traffic and time of a step.
"""
