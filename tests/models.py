"""Small models, all seeded: the same arguments give the same weights in every process.

Sizes are odd on purpose (vocabulary 97, 7x13, 1-element tensors), so that shards cut tensors and need padding.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 97


def tiny_causal_lm(
    kind: str = "qwen2",
    *,
    tied: bool = False,
    layers: int = 2,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
) -> nn.Module:
    """A Qwen2 or Llama of ``layers`` blocks, hidden 32, intermediate 56, in fp32 with rotary tables in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[kind]
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.1,  # larger than usual: gradients of all parameters are then well above rounding
        use_cache=False,
    )
    return model_class(config)


def save_tiny_qwen(folder, *, vocabulary: int) -> None:
    """Save a Qwen2 of 2 blocks, hidden 16, as a plain checkpoint."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


class Perceptron(nn.Module):
    """7 → 13 → 7, ``depth`` times, with a block list the engine finds, and a scalar parameter."""

    def __init__(self, *, depth: int = 2, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7)) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, *, skip: tuple[int, ...] = ()) -> Tensor:
        """Run the blocks that are not in ``skip``; x and the result are [batch, 7]."""
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x = x + block(x)
        return x * self.scale


class Recomputed(Perceptron):
    """A Perceptron whose blocks run under activation checkpointing; the first one is used twice if ``shared``."""

    def __init__(self, *, reentrant: bool, shared: bool = False, depth: int = 3, seed: int = 0) -> None:
        super().__init__(depth=depth, seed=seed)
        self.reentrant, self.shared = reentrant, shared

    def forward(self, x: Tensor, *, skip: tuple[int, ...] = ()) -> Tensor:
        order = [*self.blocks, self.blocks[0]] if self.shared else list(self.blocks)
        if self.reentrant:
            x = x.detach().requires_grad_()  # reentrant checkpoints give no gradients when no input needs one
        for block in order:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return x * self.scale


class Experts(nn.Module):
    """Two experts behind each other's back: a call uses one of them."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inward = nn.Linear(7, 13)
        self.experts = nn.ModuleList(nn.Linear(13, 13) for _ in range(2))
        self.outward = nn.Linear(13, 1)

    def forward(self, x: Tensor, *, expert: int) -> Tensor:
        return self.outward(torch.tanh(self.experts[expert](torch.tanh(self.inward(x)))))


class Specks(nn.Module):
    """Five tensors of one element: with four ranks some hold nothing of some groups."""

    def __init__(self) -> None:
        super().__init__()
        self.specks = nn.ParameterList(nn.Parameter(torch.tensor([0.5 + k])) for k in range(5))

    def forward(self, x: Tensor) -> Tensor:
        return sum(speck * x ** (k + 1) for k, speck in enumerate(self.specks))


def tokens(*key: int, batch: int = 2, length: int = 6) -> Tensor:
    """Token ids [batch, length], drawn from a seed that ``key`` (step, micro-batch, rank ...) gives."""
    return torch.randint(VOCABULARY, (batch, length), generator=_generator(key))


def points(*key: int, batch: int = 3) -> Tensor:
    """Inputs [batch, 7] fp32, drawn from a seed that ``key`` gives."""
    return torch.randn(batch, 7, generator=_generator(key))


def _generator(key: tuple[int, ...]) -> torch.Generator:
    seed = 17
    for part in key:
        seed = (seed * 1009 + part) % (1 << 31)
    return torch.Generator().manual_seed(seed)
