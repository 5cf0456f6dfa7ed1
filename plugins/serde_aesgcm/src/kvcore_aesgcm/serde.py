"""The serde `aesgcm`: AES-256-GCM (NIST SP 800-38D) with a random nonce of 96 bits per object.

The encoded bytes:

    offset  size
    0       2       b"KA"
    2       1       n: length of the key's id
    3       n       the key's id, ASCII
    3 + n   12      nonce
    ...             ciphertext, as long as the payload
    ...     16      tag

What stands before the ciphertext is signed with it, and so is, without being stored, what kvcore binds the object to:
its key, and the stages of the chain up to this one. So an object that was changed, cut, or put under another name is
refused.
"""

import os
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from kvcore.api import ObjectLayout, Serde, SerdeError, SerdeUnavailable
from kvcore_aesgcm.config import AesGcmConfig
from kvcore_aesgcm.keys import read_key

MAGIC = b"KA"
NONCE_BYTES = 12
TAG_BYTES = 16
MAX_ID_BYTES = 32
PIECE_BYTES = 1 << 20
"""At once: the cipher keeps the GIL, for 0.1 ms with these."""
_SPARE = 15
"""Room that the library wants behind what it writes."""


class AesGcmSerde(Serde):
    """Encrypts with one key, decrypts with any that is configured. Without state, so several threads may use it."""

    tag = "aesgcm/1"
    lossy = False
    sealing = True

    def __init__(self, config: AesGcmConfig, context: Any) -> None:
        """Raises `ConfigError` for a key that cannot be had."""
        self._keys = {name: read_key(name, source.get_secret_value()) for name, source in config.keys.items()}
        self._current = config.current
        self._context = b""

    def bound(self, to: bytes) -> "AesGcmSerde":
        """See `Serde.bound`."""
        other = object.__new__(type(self))
        other._keys, other._current, other._context = self._keys, self._current, to
        return other

    def encode(self, source: memoryview, layout: ObjectLayout) -> memoryview:
        """See `Serde.encode`."""
        name, nonce = self._current.encode("ascii"), os.urandom(NONCE_BYTES)
        header = MAGIC + bytes([len(name)]) + name + nonce
        begin, nbytes = len(header), len(source)
        encoded = memoryview(bytearray(begin + nbytes + TAG_BYTES))  # the tag's place is spare room until then
        encoded[:begin] = header
        cipher = Cipher(algorithms.AES(self._keys[self._current]), modes.GCM(nonce)).encryptor()
        cipher.authenticate_additional_data(header + self._context)
        _through(cipher, source, encoded[begin:])
        cipher.finalize()
        encoded[begin + nbytes :] = cipher.tag
        return encoded

    def decode(self, source: memoryview, into: memoryview, layout: ObjectLayout) -> None:
        """See `Serde.decode`. Without the key: `SerdeUnavailable`."""
        id_bytes = source[2] if len(source) > len(MAGIC) else 0
        begin = len(MAGIC) + 1 + id_bytes + NONCE_BYTES
        if not 0 < id_bytes <= MAX_ID_BYTES or source[:2] != MAGIC:
            raise SerdeError("not the header of this encoding")
        if len(source) != begin + len(into) + TAG_BYTES:
            raise SerdeError(f"{len(source)} bytes do not hold {len(into)}")
        header = bytes(source[:begin])
        name = header[3 : 3 + id_bytes].decode("ascii", "replace")
        if name not in self._keys:
            raise SerdeUnavailable(f"encrypted with key {name!r}; configured are {', '.join(self._keys)}")
        mode = modes.GCM(header[-NONCE_BYTES:], bytes(source[-TAG_BYTES:]))
        cipher = Cipher(algorithms.AES(self._keys[name]), mode).decryptor()
        cipher.authenticate_additional_data(header + self._context)
        payload = source[begin:-TAG_BYTES]
        direct = max(0, len(payload) - _SPARE)
        _through(cipher, payload[:direct], into)
        into[direct:] = cipher.update(payload[direct:])
        try:
            cipher.finalize()
        except InvalidTag:
            into[:] = bytes(len(into))  # it is somebody's, and not known to be the caller's
            raise SerdeError("changed since it was encrypted, or another object's") from None

    def max_encoded_bytes(self, nbytes: int) -> int:
        """See `Serde.max_encoded_bytes`."""
        return len(MAGIC) + 1 + MAX_ID_BYTES + NONCE_BYTES + nbytes + TAG_BYTES


def _through(cipher: CipherContext, source: memoryview, into: memoryview) -> None:
    """`into` has `_SPARE` bytes more than `source`, at least."""
    for at in range(0, len(source), PIECE_BYTES):
        piece = source[at : at + PIECE_BYTES]
        cipher.update_into(piece, into[at : at + len(piece) + _SPARE])
