"""Looking at a run: comparison of tensors, tensor by tensor.

Import the modules, not this package: ``lens.compare`` loads torch, others here need not.
"""
