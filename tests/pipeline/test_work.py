"""What a pass must do, held against counts made by hand."""

import dataclasses

import pytest

from drafters.shapes import TransformerShape
from pipeline.work import Pass, chip_shape, held_bytes, width_utilisation, work_of

SHAPE = TransformerShape(
    vocab_size=1024,
    num_layers=3,
    width=64,
    num_heads=16,
    num_kv_heads=4,
    head_dim=8,
    mlp_width=160,
    tied_head=False,
)
ONE = Pass(batch=2, tokens=3, context=100, capacity=128)


def test_a_chip_has_its_share_of_heads_mlp_and_vocabulary():
    share = chip_shape(SHAPE, 16)
    # Four key/value heads are repeated four times, so that each chip has one.
    assert (share.num_heads, share.num_kv_heads, share.mlp_width) == (1, 1, 10)
    assert (share.vocab_size, share.width, share.num_layers) == (64, 64, 3)


def test_what_does_not_divide_is_done_whole():
    odd = dataclasses.replace(SHAPE, num_heads=3, num_kv_heads=1, vocab_size=1000)
    share = chip_shape(odd, 16)
    assert (share.num_heads, share.num_kv_heads, share.vocab_size) == (3, 1, 1000)
    assert share.mlp_width == 10
    nine = chip_shape(dataclasses.replace(SHAPE, num_heads=9, num_kv_heads=3), 16)
    assert (nine.num_heads, nine.num_kv_heads) == (1, 1)  # seven chips hold one of zeros


def test_a_trimmed_head_keeps_its_rows():
    trimmed = dataclasses.replace(SHAPE, head_vocab=100)
    share = chip_shape(trimmed, 16)
    assert share.logits_size == 100  # 100 does not divide over 16
    assert chip_shape(dataclasses.replace(SHAPE, head_vocab=96), 16).logits_size == 6


def test_one_chip_has_all():
    assert chip_shape(SHAPE, 1) == SHAPE


def test_bytes_flops_and_collectives():
    work = work_of(SHAPE, 16, 16, ONE, "float32")
    layer = (1 + 2 + 1) * 8 * 64 + 3 * 64 * 10 + 2 * 64
    head = 64 * 64
    assert work.weight_bytes == 4 * (3 * layer + 64 + head)
    assert work.cache_bytes == 4 * 2 * 3 * 8 * 2 * 103
    # Vectors of 8 floats take a line of 64 bytes, as 16 would.
    assert work.capacity_bytes == 2 * 4 * 2 * 3 * 8 * 2 * 128
    columns = 2 * 3
    assert work.flops == columns * (2 * (3 * layer + 64 + head) + 4 * 8 * 103 * 3)
    assert (work.reduces, work.gathers) == (2 * 3 + 1, 1)
    assert (work.reduce_bytes, work.gather_bytes) == (64 * columns * 4, 64 * columns * 4)


def test_a_prompt_makes_logits_of_its_last_token_alone():
    one, last = (
        work_of(SHAPE, 1, 1, ONE._replace(last_only=only), "float32") for only in (False, True)
    )
    assert one.flops - last.flops == 2 * 1024 * 64 * 2 * (3 - 1)
    assert one.weight_bytes == last.weight_bytes


def test_held_bytes_count_weights_and_cache():
    empty, full = (held_bytes(SHAPE, 16, batch, 128, "bfloat16") for batch in (0, 2))
    assert empty == 2 * chip_shape(SHAPE, 16).num_params()
    assert full - empty == 2 * 2 * 128 * 2 * 3 * 8


@pytest.mark.parametrize(("width", "expected"), [(2048, 1.0), (96, 0.14)])
def test_width_utilisation_is_of_matrix_tiles(width, expected):
    shape = dataclasses.replace(
        SHAPE, width=width, num_heads=16, num_kv_heads=16, head_dim=width // 16,
        mlp_width=2 * width, vocab_size=2048,
    )  # fmt: skip
    # At width 96 a chip has 6 to 24 of the 128 rows of a tile, and all 128 of the head.
    found = width_utilisation(shape, 16, "tpu")
    assert found == pytest.approx(expected, abs=0.01)
