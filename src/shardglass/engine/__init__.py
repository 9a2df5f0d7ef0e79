"""The ZeRO engine: torch and ``layout`` only.

Order of reading: ``units`` (model -> ParamSpecs), ``comm`` (every collective), ``buffers`` (storage), ``grads``
(gradients to shards), ``optim`` (shards to parameters), ``runtime`` (the hooks that drive them), ``handle`` (what a
user holds).
"""
