"""The ZeRO engine: torch and ``layout`` only.

Order of reading: ``units`` (model -> ParamSpecs), ``comm`` (every collective), ``buffers`` (storage), ``grads``
(gradients to shards), ``optim`` (shards to parameters), ``order`` and ``gathers`` (when parameters are whole),
``runtime`` (the hooks that drive them), ``shard`` (puts them together), ``handle`` (what a user holds).
"""
