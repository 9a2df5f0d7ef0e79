"""Looking at a run: where every tensor is, what wraps what, and comparison of tensors.

Import the modules, not this package: ``look`` with its readers and ``compare`` load torch; ``snapshot``,
``whereabouts``, ``changes``, ``check`` and ``wrappers`` do not.
"""
