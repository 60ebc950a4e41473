"""A block of examples as bytes: an uncompressed `.npz`, byte for byte reproducible. Specified in docs/data-format.md.

`numpy.load` reads these bytes; so does `webdataset`'s `.decode()`. They are written and parsed here by hand because a
block is decoded for every 256 examples of training: `numpy.load` takes 1.3 ms for one, most of it in `zipfile` and in
evaluating array headers, and this file about a tenth of that, CRC check included.

The zip layout is PKWARE's APPNOTE 6.3, sections 4.3.7 (local header), 4.3.12 (central directory), 4.3.16 (its end);
the array header is NumPy's format 1.0 (numpy.lib.format).
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from functools import lru_cache

import numpy as np

from data_pipeline.records import Block

MEMBERS = tuple(Block.__slots__)
"""Names of the arrays, in the order of the file."""

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_ZIP_VERSION = 20
_DOS_DATE = 0x21  # 1980-01-01, the earliest a zip can say: bytes do not depend on the clock
_NPY_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(rb"\{'descr': '([<|][ui][124])', 'fortran_order': False, 'shape': \(([0-9, ]*)\), \} *\n")
_I1, _U2, _U4 = np.dtype("<i1"), np.dtype("<u2"), np.dtype("<u4")
_DTYPES = {
    "input_ids": (_U2, _U4),
    "lengths": (_U2,),
    "segment_a_lengths": (_U2,),
    "nsp_labels": (_I1,),
    "mask_counts": (_U2,),
    "mask_positions": (_U2,),
    "mask_inputs": (_U2, _U4),
}


class ShardError(ValueError):
    """A shard, block or index that cannot be used; the message names it, what was expected and what to do."""


def check_block(block: Block, where: str, *, deep: bool) -> None:
    """Check the invariants that `Block` documents.

    Args:
        block: what to check.
        where: shard and key, for the message.
        deep: also check every mask position, which costs more than all the rest.

    Raises:
        ShardError: names the array and the rule that it breaks.
    """

    def need(holds: bool, rule: str) -> None:
        if not holds:
            raise ShardError(f"{where}: {rule}; the shard is damaged or was written by something else, build it again")

    for name, allowed in _DTYPES.items():
        array = getattr(block, name)
        if array.dtype not in allowed:  # the message is costly, and this runs for every block
            need(False, f"{name} is {array.dtype.name}, expected {' or '.join(one.name for one in allowed)}")
        dimensions = 2 if name == "mask_counts" else 1
        need(array.ndim == dimensions, f"{name} has {array.ndim} dimensions, expected {dimensions}")
    examples = len(block.lengths)
    need(examples > 0, "no examples in the block")
    need(len(block.segment_a_lengths) == examples, "segment_a_lengths and lengths differ in number")
    need(len(block.nsp_labels) == examples, "nsp_labels and lengths differ in number")
    need(block.mask_counts.shape[1] == examples, "mask_counts has another number of examples than lengths")
    need(int(block.lengths.min()) > 0, "an example has no tokens")
    total = int(block.lengths.sum(dtype=np.int64))
    need(total == block.tokens, f"lengths sum to {total}, input_ids holds {block.tokens}")
    need(bool((block.segment_a_lengths <= block.lengths).all()), "a segment A is longer than its example")
    need(int(block.nsp_labels.min()) >= -1 and int(block.nsp_labels.max()) <= 1, "nsp_labels has other than -1, 0, 1")
    predictions = int(block.mask_counts.sum(dtype=np.int64))
    need(predictions == len(block.mask_positions), f"mask_counts sum to {predictions}, mask_positions differ in number")
    need(predictions == len(block.mask_inputs), f"mask_counts sum to {predictions}, mask_inputs differ in number")
    need(block.mask_inputs.dtype == block.input_ids.dtype, "mask_inputs and input_ids differ in type")
    if deep and predictions:
        counts = block.mask_counts.ravel()
        limits = np.repeat(np.tile(block.lengths, len(block.mask_counts)), counts)
        need(bool((block.mask_positions < limits).all()), "a mask position lies outside its example")
        rises = np.diff(block.mask_positions.astype(np.int32)) > 0
        starts = np.cumsum(counts[counts > 0], dtype=np.int64)[:-1]
        rises[starts - 1] = True
        need(bool(rises.all()), "mask positions do not ascend within an example")


def encode_block(block: Block) -> bytes:
    """The block as `.npz` bytes, the same for the same arrays on any machine and at any time.

    Raises:
        ShardError: the block breaks a rule of `Block`.
    """
    check_block(block, "block to be written", deep=True)
    parts: list[bytes] = []
    directory: list[bytes] = []
    offset = 0
    for name in MEMBERS:
        array = np.ascontiguousarray(getattr(block, name))
        body = _array_header(array) + array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        member = f"{name}.npy".encode()
        common = (_ZIP_VERSION, 0, 0, 0, _DOS_DATE, zlib.crc32(body), len(body), len(body), len(member), 0)
        parts += [_LOCAL.pack(b"PK\x03\x04", *common), member, body]
        directory += [_CENTRAL.pack(b"PK\x01\x02", _ZIP_VERSION, *common, 0, 0, 0, 0, offset), member]
        offset += _LOCAL.size + len(member) + len(body)
    size = sum(map(len, directory))
    end = _END.pack(b"PK\x05\x06", 0, 0, len(MEMBERS), len(MEMBERS), size, offset, 0)
    return b"".join([*parts, *directory, end])


def _array_header(array: np.ndarray) -> bytes:
    shape = f"({array.shape[0]},)" if array.ndim == 1 else f"({', '.join(map(str, array.shape))})"
    descr = array.dtype.newbyteorder("<").str
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    padding = -(len(_NPY_MAGIC) + 2 + len(text) + 1) % 64
    text += b" " * padding + b"\n"
    return _NPY_MAGIC + struct.pack("<H", len(text)) + text


def decode_block(data: bytes | memoryview, *, where: str, deep: bool = False) -> Block:
    """Read what `encode_block` wrote. The arrays are read-only views of `data`.

    Args:
        data: the whole `.npz`.
        where: shard and key, for messages.
        deep: also check every mask position.

    Raises:
        ShardError: truncated, edited (each array has a CRC-32), compressed, an array missing, unknown or twice, or a
            broken rule of `Block`.
    """
    data = bytes(data)
    try:
        arrays = _parse(data, where)
    except struct.error as error:
        raise ShardError(f"{where}: truncated block ({error}); copy or build the shard again") from error
    missing = [name for name in MEMBERS if name not in arrays]
    if missing:
        raise ShardError(f"{where}: the block lacks {', '.join(missing)}; it is not a block of this format")
    block = Block(**arrays)
    check_block(block, where, deep=deep)
    return block


def _parse(data: bytes, where: str) -> dict[str, np.ndarray]:
    if len(data) < _END.size or data[-_END.size :][:4] != b"PK\x05\x06":
        raise ShardError(f"{where}: truncated or not an .npz block ({len(data)} bytes); copy or build the shard again")
    _, _, _, _, count, _, position, _ = _END.unpack_from(data, len(data) - _END.size)
    arrays: dict[str, np.ndarray] = {}
    for _ in range(count):
        entry = _CENTRAL.unpack_from(data, position)
        signature, method, crc, size, raw_size, name_length = entry[0], entry[4], *entry[7:11]
        extra, comment, start = entry[11], entry[12], entry[16]
        if signature != b"PK\x01\x02":
            raise ShardError(f"{where}: damaged block (no zip directory where its end points); copy the shard again")
        name_at = position + _CENTRAL.size
        name = data[name_at : name_at + name_length].decode("ascii", "replace").removesuffix(".npy")
        position = name_at + name_length + extra + comment
        if method != 0 or size != raw_size:
            raise ShardError(f"{where}: {name} is compressed; blocks hold uncompressed arrays only")
        if name not in _DTYPES or name in arrays:
            raise ShardError(f"{where}: array {name!r} is {'twice in' if name in arrays else 'unknown to'} this format")
        local = _LOCAL.unpack_from(data, start)
        body = start + _LOCAL.size + local[9] + local[10]
        view = memoryview(data)[body : body + size]
        if len(view) != size or zlib.crc32(view) != crc:
            raise ShardError(f"{where}: {name} does not match its CRC-32: the bytes were changed; copy the shard again")
        arrays[name] = _parse_array(view, f"{where}: {name}")
    return arrays


def _parse_array(view: memoryview, where: str) -> np.ndarray:
    if bytes(view[:8]) != _NPY_MAGIC:
        raise ShardError(f"{where} is not a NumPy array of format 1.0")
    start = 10 + struct.unpack_from("<H", view, 8)[0]
    header = _parse_header(bytes(view[10:start]))
    if header is None:
        raise ShardError(f"{where} has an array header of another form; expected little-endian integers in C order")
    dtype, shape = header
    if math.prod(shape) * dtype.itemsize != len(view) - start:
        raise ShardError(f"{where} holds {len(view) - start} bytes, its shape {shape} needs another number")
    return np.frombuffer(view, dtype, offset=start).reshape(shape)


@lru_cache(maxsize=4096)
def _parse_header(text: bytes) -> tuple[np.dtype, tuple[int, ...]] | None:
    """Type and shape of an array; the blocks of a data set have few different headers."""
    header = _HEADER.fullmatch(text)
    if header is None:
        return None
    return np.dtype(header[1].decode()), tuple(int(part) for part in header[2].split(b",") if part.strip())
