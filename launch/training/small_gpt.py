"""A small GPT in plain PyTorch: RMSNorm, causal attention, a GELU MLP, learned positions, an untied output layer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Standard deviation of new parameters. Those that end a residual branch have less, so that the sum of all branches does
# not grow with their number.
STD = 0.02


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv, self.attention_out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[b, s, D] -> [b, s, D]"""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [b, heads, s, D / heads]
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class SmallGPT(nn.Module):
    """Its result are the hidden states that the output layer projects; `head [V, D]` is that layer's weight."""

    def __init__(self, layers: int, hidden: int, heads: int, vocab_size: int, sequence: int):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(vocab_size, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Parameter(torch.empty(vocab_size, hidden))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends_branch = name.endswith(("attention_out.weight", "down.weight"))
                nn.init.normal_(parameter, std=STD * (2 * layers) ** -0.5 if ends_branch else STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [b, s] -> hidden states [b, s, D]"""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)
