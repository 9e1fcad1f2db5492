"""The batch of a step on the GPU: its lists, its padding, and block tables that change between steps."""

import random

import pytest
import torch

from engine.backends.cuda import batch_tensors
from engine.backends.cuda.batch_tensors import NO_PENDING_TOKENS, BatchLimits, PendingTokens, StepBuffers
from engine.backends.cuda.graph_sizes import GraphSize
from engine.batch import Batch
from engine.kernels.attention_tiles import TileQueries, decode_tiles, padded_tiles, query_tiles
from tests.engine.backends.cuda.two_devices import gpu

LIMITS = BatchLimits(tokens=64, requests=5, table_blocks=9, groups=2)
QUERIES = TileQueries(few=2, many=8)


def batch_of(counts: list[int], tables: list[list[list[int]]], rows: list[int]) -> Batch:
    total = sum(counts)
    starts = [sum(counts[:number]) for number in range(len(counts) + 1)]
    numbers = [random.randrange(1000) for _ in range(total)]
    slots = tuple([random.randrange(1000) for _ in range(total)] for _ in tables)
    return Batch(numbers, [it + 7 for it in numbers], slots, tuple(tables), starts, counts, rows)


def test_all_lists_of_a_batch_are_copied_to_the_gpu(device: torch.device) -> None:
    buffers = StepBuffers(LIMITS, gpu(device))
    for counts, rows in (([3, 1, 11], [2, 14]), ([1, 1], [0, 1]), ([5], [4])):
        tables = [[[random.randrange(99) for _ in range(9)] for _ in counts] for _ in range(2)]
        batch = batch_of(counts, tables, rows)
        tiles = query_tiles(batch.query_starts, batch.context_lengths, QUERIES)
        sent = buffers.fill(batch, tiles)
        assert sent.token_ids.tolist() == batch.token_ids
        assert sent.positions.tolist() == batch.positions
        assert [it.tolist() for it in sent.slots] == list(batch.slot_mappings)
        assert [it.tolist() for it in sent.tables] == tables
        assert sent.query_starts.tolist() == batch.query_starts
        assert sent.context_lengths.tolist() == counts
        assert (sent.logit_rows is None) if counts == [1, 1] else (sent.logit_rows is not None)
        if sent.logit_rows is not None:
            assert sent.logit_rows.tolist() == rows
        for sent_list, wanted in zip(sent.tiles.lists, tiles.lists, strict=True):
            assert torch.equal(sent_list.tiles.cpu(), wanted.tiles)
        tensors = [sent.token_ids, sent.positions, *sent.slots, sent.query_starts, sent.context_lengths]
        assert all(it.data_ptr() % 16 == 0 for it in tensors)


def test_padding_requests_have_one_token_and_no_context(device: torch.device) -> None:
    buffers = StepBuffers(LIMITS, gpu(device))
    tiles = decode_tiles(5, 64, QUERIES).to(gpu(device).device)
    addresses = []
    for count in (3, 4, 2):
        tables = [[[3, 4]] * count] * 2
        batch = batch_of([1] * count, tables, list(range(count)))
        sent = buffers.fill(batch, tiles, NO_PENDING_TOKENS, GraphSize(5, 64))
        padding = [0] * (5 - count)
        assert sent.token_ids.tolist() == [*batch.token_ids, *padding]
        assert [it.tolist() for it in sent.slots] == [[*it, *padding] for it in batch.slot_mappings]
        assert sent.context_lengths.tolist() == [*batch.context_lengths, *padding]
        assert sent.query_starts.tolist() == list(range(6))
        assert sent.logit_rows is None
        addresses.append([it.data_ptr() for it in (sent.token_ids, sent.query_starts, sent.context_lengths)])
    assert addresses[0] == addresses[1] == addresses[2]  # a captured step always reads these addresses


def test_padding_tokens_of_several_tokens_per_request_belong_to_no_request(device: torch.device) -> None:
    buffers, size = StepBuffers(LIMITS, gpu(device)), GraphSize(2, 64, queries=4)
    addresses = []
    for counts, rows, starts in (
        ([4, 4], [0, 1, 2, 3, 4, 5, 6, 7], [0, 4, 8, 8]),
        ([3, 1], [0, 2, 3], [0, 3, 4, 8]),
        ([2], [1], [0, 2, 3, 8]),
    ):
        batch, padding = batch_of(counts, [[[3, 4]] * len(counts)] * 2, rows), [0] * (8 - sum(counts))
        tiles = padded_tiles(starts, 2, 4, 64, QUERIES)
        sent = buffers.fill(batch, tiles, size=size)
        assert sent.token_ids.tolist() == [*batch.token_ids, *padding]
        assert [it.tolist() for it in sent.slots] == [[*it, *padding] for it in batch.slot_mappings]
        assert sent.context_lengths.tolist() == [*counts, 0, 0][:3]
        assert sent.query_starts.tolist() == starts
        assert sent.logit_rows is not None
        assert sent.logit_rows.tolist() == [*rows, *[0] * (8 - len(rows))]
        assert torch.equal(sent.tiles.lists[0].tiles.cpu(), tiles.lists[0].tiles)
        tensors = sent.token_ids, *sent.slots, sent.query_starts, sent.context_lengths, sent.logit_rows
        addresses.append([it.data_ptr() for it in (*tensors, sent.tiles.lists[0].tiles)])
    assert addresses[0] == addresses[1] == addresses[2]  # a captured step always reads these addresses


def test_block_tables_equal_those_of_the_batch(device: torch.device) -> None:
    """Tables grow, lose their first blocks, and are replaced. A list object may later hold other blocks."""
    buffers, rng = StepBuffers(LIMITS, gpu(device)), random.Random(1)
    tables: list[list[list[int]]] = [[[rng.randrange(99)] for _ in range(4)] for _ in range(2)]
    for _ in range(60):
        for table in (it for group in tables for it in group):
            chance = rng.random()
            if chance < 0.3 and len(table) < 9:
                table.append(rng.randrange(99))
            elif chance < 0.4:
                table[rng.randrange(len(table))] = 0
            elif chance < 0.5:
                table[:] = [rng.randrange(99) for _ in range(rng.randint(1, 9))]
        count = rng.randint(1, 4)
        batch = batch_of([1] * count, [group[:count] for group in tables], list(range(count)))
        sent = buffers.fill(batch, query_tiles(batch.query_starts, batch.context_lengths, QUERIES))
        for table_rows, group in zip(sent.tables, tables, strict=True):
            for row, table in zip(table_rows.tolist(), group, strict=False):
                assert row[: len(table)] == table
        rng.shuffle(tables[0])
        if rng.random() < 0.1:
            buffers.invalidate_tables()


@pytest.mark.parametrize("where", ["_send", "_apply"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_tables_are_sent_again_after_any_failure(
    where: str, error: type[BaseException], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers = StepBuffers(LIMITS, gpu(device))

    def fill(*blocks: int) -> list[list[list[int]]]:
        batch = batch_of([1], [[list(blocks)]] * 2, [0])
        sent = buffers.fill(batch, query_tiles(batch.query_starts, batch.context_lengths, QUERIES))
        return [table.tolist() for table in sent.tables]

    def fail(*_: object) -> None:
        raise error("injected")

    fill(3, 4)
    with monkeypatch.context() as broken:
        broken.setattr(buffers, where, fail)
        with pytest.raises(error, match="injected"):
            fill(7, 8)
    assert [rows[0][:2] for rows in fill(7, 8)] == [[7, 8]] * 2


def test_entries_beyond_the_staging_buffer_are_sent_separately(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_tensors, "STAGED_ENTRIES", 0)
    limits = BatchLimits(tokens=2, requests=2, table_blocks=3000, groups=1)
    buffers = StepBuffers(limits, gpu(device))
    tables = [[list(range(3000)), list(range(3000, 6000))]]
    batch = batch_of([1, 1], tables, [0, 1])
    sent = buffers.fill(batch, query_tiles(batch.query_starts, batch.context_lengths, QUERIES))
    assert sent.tables[0].tolist() == tables[0]


def test_pending_tokens_get_their_sampled_ids(device: torch.device) -> None:
    buffers = StepBuffers(LIMITS, gpu(device))
    batch = batch_of([3, 1, 1], [[[1]] * 3] * 2, [2, 3, 4])
    sampled = torch.tensor([50, 60, 70], device=gpu(device).device)
    sent = buffers.fill(
        batch, query_tiles(batch.query_starts, [3, 1, 1], QUERIES), PendingTokens([2, 4], [2, 0], sampled)
    )
    assert sent.token_ids.tolist() == [*batch.token_ids[:2], 70, batch.token_ids[3], 50]


def test_batch_beyond_the_limits_is_rejected(device: torch.device) -> None:
    buffers = StepBuffers(LIMITS, gpu(device))
    for counts, table in (([65], [1]), ([1] * 6, [1]), ([1], [1] * 10)):
        batch = batch_of(counts, [[table] * len(counts)] * 2, [0])
        with pytest.raises(IndexError):
            buffers.fill(batch, query_tiles(batch.query_starts, batch.context_lengths, QUERIES))
