"""Labels of packed sequences that heads for multi-token prediction would learn under context parallelism."""

import torch
from cpu_ranks import on_cpu

# Two examples of 6 and 4 tokens, padded to multiples of 2 * cp, and what a head must learn: the next token of each.
EXAMPLES, PADDED = [0, 6, 10], [0, 8, 12]
TOKENS = [1, 2, 3, 4, 5, 6, 0, 0, 11, 12, 13, 14]
SHIFTED = [2, 3, 4, 5, 6, 0, 0, 0, 12, 13, 14, 0]


def _shifted(ends: list[int]) -> list[int]:
    """A rank's labels, as core shifts them by the ends of sequences that Bridge tells it."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_token_prediction import roll_tensor

    torch.distributed.init_process_group("gloo")
    lengths = PackedSeqParams(qkv_format="thd", cu_seqlens_q=torch.tensor(ends))
    mine = torch.tensor([_part(TOKENS, torch.distributed.get_rank())])
    shifted, _ = roll_tensor(mine, cp_group=torch.distributed.group.WORLD, packed_seq_params=lengths)
    return shifted[0].tolist()


def _part(tokens: list[int], rank: int) -> list[int]:
    """Of four pieces of each sequence the first rank has the outer ones, and the second the inner ones."""
    pieces = (0, 3) if rank == 0 else (1, 2)
    starts = [(first + piece * size, size) for first, size in ((0, 2), (8, 1)) for piece in pieces]
    return [token for start, size in starts for token in tokens[start : start + size]]


def test_ends_of_padded_sequences_would_be_right():
    assert on_cpu(_shifted, PADDED, world_size=2) == [_part(SHIFTED, 0), _part(SHIFTED, 1)]


def test_core_takes_the_ends_before_padding():
    """If this fails, core shifts within examples, and the rule heads_learn_within_examples can go."""
    assert on_cpu(_shifted, EXAMPLES, world_size=2) != [_part(SHIFTED, 0), _part(SHIFTED, 1)]


def test_bridge_tells_core_the_ends_before_padding():
    assert on_cpu(_told) == [[EXAMPLES, PADDED]]


def _told() -> list[list[int]]:
    from megatron.bridge.training.utils.packed_seq_utils import get_packed_seq_params

    batch = {"cu_seqlens": torch.tensor([[*PADDED, -1]]), "cu_seqlens_unpadded": torch.tensor([[*EXAMPLES, -1]])}
    told = get_packed_seq_params({**batch, "max_seqlen": torch.tensor([8])})
    return [told.cu_seqlens_q.tolist(), told.cu_seqlens_q_padded.tolist()]
