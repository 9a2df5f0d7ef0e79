"""A GGUF file of a tiny model."""

import gguf
import torch


def write_gguf(path):
    """A tiny Llama as llama.cpp keeps it, in float32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(48)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(96)
    writer.add_token_list([f"t{k}" for k in range(96)])
    random = torch.Generator().manual_seed(5)
    shapes = {"token_embd": (96, 32), "output_norm": (32,), "output": (96, 32)}
    block = {
        "attn_norm": (32,), "ffn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32),
        "attn_output": (32, 32), "ffn_gate": (48, 32), "ffn_up": (48, 32), "ffn_down": (32, 48),
    }  # fmt: skip
    shapes |= {f"blk.{k}.{name}": shape for k in range(2) for name, shape in block.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=random).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
