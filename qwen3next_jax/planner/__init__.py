"""The planner: compiles the train step for a TPU slice or GPUs that exist only as a description,
and predicts the memory, the network traffic and, for TPUs, the time of a step.
"""
