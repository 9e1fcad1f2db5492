"""What attention's instructions do, cut into units as `units` has it: heads on their way into the cache, and what
tokens see there.

A tile is up to QUERIES consecutive tokens of one request. One of several tokens is attended to whole; a single token's
context is cut into pieces, each of them for anyone, which are merged by the instruction behind. Everything here is
compiled and takes the words of an instruction and of the step header; nothing is checked.
"""

from engine.backends.cpu.attention import PIECE, QUERIES, SCORE_ROW, HeadBlocks, attend_piece, attend_tile, first_seen
from engine.backends.cpu.kv_store import rotate, store_key_value
from engine.backends.cpu.program import ONE_BITS, Record
from engine.backends.cpu.records import RECORD_TAIL, merge_pieces
from engine.config import BLOCK_SIZE
from quant.cpu.activations import FORM_KERNELS, GROUP, Form, write_row
from quant.cpu.kernel import jit, word
from quant.cpu.norms import layer_norm_row, norm_factor

_scale_floats = FORM_KERNELS[Form.FLOAT].scale_row


@jit
def _normalize(a: Record, x: int, weight: int) -> None:
    """One head in place."""
    groups = a.head_dim // GROUP
    if a.centered:
        layer_norm_row(x, weight, groups, a.epsilon, x)
    else:
        _scale_floats(x, norm_factor(x, groups, a.epsilon), weight, groups, x)


@jit
def rope_store(a: Record, h: Record, first: int, last: int) -> None:
    """A unit is one KV head of one token, with the query heads that share it. q, k and v lie side by side at x."""
    size, queries = 4 * a.head_dim, a.kv_heads * a.heads
    slots = h.slots + a.group * h.slot_group
    for unit in range(first, last):
        m, head = unit // a.kv_heads, unit % a.kv_heads
        row, position, slot = a.x + m * a.x_stride, word(h.positions, m), word(slots, m)
        angles = position * a.rotary * 2  # bytes of half as many float32
        cosine, sine = a.cosine + angles, a.sine + angles
        for query in range(head * a.heads, (head + 1) * a.heads):
            if a.q_norm != 0:
                _normalize(a, row + query * size, a.q_norm + query * a.norm_stride)
            rotate(row + query * size, cosine, sine, a.head_dim, a.rotary, a.scale, a.neighbours)
        key = row + (queries + head) * size
        if a.k_norm != 0:
            _normalize(a, key, a.k_norm + head * a.norm_stride)
        rotate(key, cosine, sine, a.head_dim, a.rotary, ONE_BITS, a.neighbours)
        block = a.cache + slot // BLOCK_SIZE * a.block_bytes + head * a.head_bytes
        store_key_value(a.kernel, key, key + a.kv_heads * size, block, slot % BLOCK_SIZE, a.head_dim)


@jit
def _pieces(a: Record, h: Record, tile: int) -> int:
    """How many pieces a tile that is a single token sees something of; 0 for several tokens."""
    if word(h.tile_list, 3 * tile + 1) > 1:
        return 0
    position = word(h.positions, word(h.tile_list, 3 * tile))
    pieces: int = position // PIECE + 1 - first_seen(position, a.window) // PIECE
    return pieces


@jit
def count_attend_units(a: Record, h: Record) -> int:
    """For each KV head: a tile of several tokens is a unit, and so is each piece of a single one."""
    units = 0
    for tile in range(h.tiles):
        units += max(1, _pieces(a, h, tile))
    return units * a.kv_heads


@jit
def attend(a: Record, h: Record, first: int, last: int, scratch: int) -> None:
    record = 4 * a.head_dim + RECORD_TAIL
    unit, tables = 0, h.tables + a.group * h.table_group
    for tile in range(h.tiles):
        at = h.tile_list + 24 * tile
        token, tokens, request = word(at, 0), word(at, 1), word(at, 2)
        pieces, position = _pieces(a, h, tile), word(h.positions, token)
        here, table = max(1, pieces) * a.kv_heads, tables + request * h.table_stride
        for i in range(max(0, first - unit), min(here, last - unit)):
            head, piece = i % a.kv_heads, i // a.kv_heads
            q = a.x + token * a.x_stride + head * a.heads * a.head_dim * 4
            cache = a.cache + head * a.head_bytes
            kv = HeadBlocks(
                cache, a.block_bytes, a.head_dim, a.window, a.softcap, a.scores, a.soften, a.gather_values
            )  # fmt: skip
            if pieces == 0:
                out = a.out + token * a.out_stride + head * a.heads * a.head_dim * 4
                records = scratch + QUERIES * SCORE_ROW
                attend_tile(
                    q, a.x_stride, a.heads, position, tokens, table, kv, scratch, records, out, a.out_stride
                )  # fmt: skip
            else:
                start = (first_seen(position, a.window) // PIECE + piece) * PIECE
                part = a.parts + ((request * a.kv_heads + head) * a.max_pieces + piece) * a.heads * record
                blocks = table + start // BLOCK_SIZE * 8
                attend_piece(a.heads, q, 4 * a.head_dim, position + 1 - start, 0, blocks, kv, scratch, part, record)
        unit += here
        if unit >= last:
            return


@jit
def _tile_of(h: Record, token: int) -> int:
    """The tile that a token is in; they lie in order."""
    first, last = 0, h.tiles
    while last - first > 1:
        middle = (first + last) // 2
        if word(h.tile_list, 3 * middle) <= token:
            first = middle
        else:
            last = middle
    return first


@jit
def _merge_token(a: Record, h: Record, tile: int, m: int, out: int, scratch: int) -> None:
    """Write token `m` of a tile in the reader's form: the row, or what its pieces give where it is a single token."""
    size = 4 * a.head_dim
    record = size + RECORD_TAIL
    request, pieces = word(h.tile_list, 3 * tile + 2), _pieces(a, h, tile)
    row = a.x + m * a.x_stride
    if pieces > 0:
        row = scratch + record
        for query in range(a.kv_heads * a.heads):
            head, member = query // a.heads, query % a.heads
            part = a.parts + ((request * a.kv_heads + head) * a.max_pieces * a.heads + member) * record
            merge_pieces(part, a.heads * record, pieces, a.head_dim, scratch, row + query * size)
    write_row(a.kernel, row, a.groups, out)


@jit
def merge(a: Record, h: Record, first: int, last: int, copy: int, scratch: int) -> None:
    """A unit is a tile, or a wanted row."""
    for unit in range(first, last):
        if a.gather:
            token, out = word(h.output_rows, unit), a.out + unit * a.out_stride + copy * a.out_copy
            _merge_token(a, h, _tile_of(h, token), token, out, scratch)
            continue
        token, tokens = word(h.tile_list, 3 * unit), word(h.tile_list, 3 * unit + 1)
        for m in range(token, token + tokens):
            _merge_token(a, h, unit, m, a.out + m * a.out_stride + copy * a.out_copy, scratch)
