"""Images and texts that are made up: the same whenever they are read, and of use only to a model that sees."""

from __future__ import annotations

from types import SimpleNamespace

from cpu_ranks import on_cpu

LENGTH = 24
VISION = SimpleNamespace(in_channels=3, temporal_patch_size=2, patch_size=4, spatial_merge_size=2)
MODEL = SimpleNamespace(
    vision_config=VISION, image_token_id=505, video_token_id=506, vision_start_token_id=507, vision_end_token_id=508
)


def made():
    from megatron.bridge.training.config import GPTDatasetConfig

    from megaboa.bridge.image_text import ImageTextDatasetConfig

    common = GPTDatasetConfig(
        random_seed=5, seq_length=LENGTH, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False
    )
    return ImageTextDatasetConfig.of(MODEL, common)


def samples():
    import torch

    from megaboa.bridge.image_text import PATTERNS, build

    config = made()
    train, valid, test = build([64, 8, 0], config)
    assert test is None and (len(train), len(valid)) == (64, 8)
    again = build([64, 8, 0], config)[0]
    texts = {}
    for number in range(64):
        one, other = train[number], again[number]
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert one["tokens"].tolist()[:6] == [507, 505, 505, 505, 505, 508] and len(one["tokens"]) == LENGTH
        told = one["loss_mask"].bool()
        assert not told[:5].any() and told[5:].all()  # the text alone, its first word too
        assert one["labels"][5:-1].tolist() == one["tokens"][6:].tolist()
        assert one["tokens"][6:].max() < 505 and one["pixels"].shape == (16, 96) and one["grid"].tolist() == [1, 4, 4]
        texts.setdefault(tuple(one["tokens"].tolist()), []).append(one["pixels"].mean(0))
    assert len(texts) == PATTERNS  # the text follows from the pattern
    means = [torch.stack(found).mean(0) for found in texts.values()]
    assert min((a - b).norm() for n, a in enumerate(means) for b in means[:n]) > 5  # and that is seen
    assert not torch.equal(train[0]["pixels"], valid[0]["pixels"])
    batch = train.collate_fn([train[0], train[1]])
    seen = batch["visual_inputs"].normalized_for_model()
    assert seen["pixel_values"].shape == (32, 96) and seen["image_grid_thw"].tolist() == [[1, 4, 4]] * 2
    return sorted(batch)


def test_samples_are_images_with_their_texts():
    assert on_cpu(samples) == [["labels", "loss_mask", "position_ids", "tokens", "visual_inputs"]]


def probed():
    import torch

    from megaboa.bridge.image_text import probe

    tokens = torch.tensor([[506, 1, 505, *range(10, 30)]] * 2)
    seen = probe(MODEL, tokens)
    placed = (tokens == 505).sum(1).tolist(), (tokens == 506).sum().item()
    return placed, sorted(seen), seen["pixel_values"].shape[0], probe(SimpleNamespace(), tokens)


def test_logits_are_compared_for_sequences_with_an_image_each():
    placed, names, patches, of_others = on_cpu(probed)[0]
    assert placed == ([4, 4], 0) and patches == 32 and of_others == {}
    assert names == ["image_grid_thw", "mm_token_type_ids", "pixel_values"]
