"""Checkpoints in an object store: S3, GCS, Azure or anything obstore reaches. No torch.

Role: the `object` tier. Keys mirror the local layout (`manifests/`, `data/`, and `leases/` for readers). Publication
is one conditional put (create, or be refused); an object is visible whole or not at all, so nothing needs a second
act. Invariants: every request has a time limit and a bounded number of retries; the library's own errors come out as
`OSError`, or `Damage` for what is missing. Knows no credentials: they come from the environment, as obstore finds
them.
"""

from __future__ import annotations

import contextlib
import datetime
import secrets
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from outlast.checkpoint.manifest import MAX_HEAD_BYTES, Damage
from outlast.checkpoint.store import generation_name, generation_number
from outlast.errors import ConfigError, EnvironmentFault

if TYPE_CHECKING:
    from obstore.store import ObjectStore as _Backend

__all__ = ["ObjectStore"]

_BUFFER_BYTES = 16 << 20
_LEASE_TTL_S = 3600.0


class ObjectStore:
    """See `Store`. `timeout_s` bounds one request, `retry_timeout_s` all tries of it."""

    tier = "object"

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 60.0,
        connect_timeout_s: float = 5.0,
        max_retries: int = 4,
        retry_timeout_s: float = 120.0,
        nonce: Callable[[], str] | None = None,
        **options: Any,
    ) -> None:
        try:
            import obstore
            import obstore.store as backends
        except ImportError as error:
            raise EnvironmentFault(
                f"{url} needs obstore, which is not installed", remedy="pip install 'outlast[checkpoint]'"
            ) from error
        self.url, self._api = url, obstore
        self._nonce = nonce if nonce is not None else lambda: secrets.token_hex(4)
        self._store: _Backend
        if url.startswith("memory://"):
            self._store = backends.MemoryStore()
            return
        client = {"timeout": f"{timeout_s}s", "connect_timeout": f"{connect_timeout_s}s", "allow_http": True}
        retry: Any = {
            "max_retries": max_retries,
            "retry_timeout": datetime.timedelta(seconds=retry_timeout_s),
        }
        make: Callable[..., Any] = backends.from_url
        try:
            self._store = make(url, client_options=client, retry_config=retry, **options)
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise ConfigError(
                f"no checkpoints can be kept at {url!r}: {error}",
                remedy="check the URL, and the region and endpoint in the environment (such as AWS_REGION)",
            ) from error

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except self._api.exceptions.NotFoundError as error:
            raise Damage("is missing", file=key.rpartition("/")[2]) from error
        except FileNotFoundError as error:
            raise Damage("is missing", file=key.rpartition("/")[2]) from error
        except self._api.exceptions.PermissionDeniedError as error:
            raise PermissionError(f"{self.url}, {key}: {_first_line(error)}") from error
        except self._api.exceptions.BaseError as error:
            raise OSError(f"{self.url}, {key}: {_first_line(error)}") from error

    def _put(self, key: str, data: bytes) -> None:
        with self._errors(key):
            self._api.put(self._store, key, data)

    def _get(self, key: str, max_bytes: int) -> bytes:
        with self._errors(key):
            found = self._api.get(self._store, key)
            if found.meta["size"] > max_bytes:
                raise Damage(
                    f"holds {found.meta['size']} bytes; at most {max_bytes} are allowed", file=key.rpartition("/")[2]
                )
            return bytes(found.bytes())

    def _list(self, prefix: str) -> list[tuple[str, datetime.datetime]]:
        with self._errors(prefix):
            pages = self._api.list(self._store, prefix=prefix)
            return [(meta["path"].rpartition("/")[2], meta["last_modified"]) for page in pages for meta in page]

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            with contextlib.suppress(Damage), self._errors(key):
                self._api.delete(self._store, key)

    # reading

    def generations(self) -> list[int]:
        numbers = [generation_number(name) for name, _ in self._list("manifests")]
        return sorted(n for n in numbers if n is not None)

    def read_head(self, generation: int) -> bytes:
        return self._get(f"manifests/{generation_name(generation)}", MAX_HEAD_BYTES)

    def read_part(self, name: str, max_bytes: int) -> bytes:
        return self._get(f"data/{name}", max_bytes)

    def open_data(self, name: str) -> ObjectReader:
        size = self.size(name)
        if size is None:
            raise Damage("is missing", file=name)
        return ObjectReader(self, name, size)

    def read_range(self, name: str, offset: int, buffer: memoryview) -> None:
        with self._errors(name):
            data = self._api.get_range(self._store, f"data/{name}", start=offset, end=offset + len(buffer))
        if len(data) != len(buffer):
            raise Damage("ends too early", file=name, offset=offset + len(data), bytes=len(buffer) - len(data))
        buffer[:] = memoryview(data)

    def names(self) -> list[str]:
        return sorted(name for name, _ in self._list("data"))

    def size(self, name: str) -> int | None:
        try:
            with self._errors(name):
                return int(self._api.head(self._store, f"data/{name}")["size"])
        except Damage:
            return None

    @contextlib.contextmanager
    def in_use(self, generation: int) -> Iterator[bytes]:
        """A lease object, removed at the end; one left by a reader that died counts for an hour.

        A reader that may not write goes without: pruning is then its owner's to time.
        """
        lease = f"leases/{generation_name(generation)}.{self._nonce()}"
        with contextlib.suppress(PermissionError):
            self._put(lease, b"")
        try:
            yield self.read_head(generation)
        finally:
            with contextlib.suppress(OSError):
                self._delete([lease])

    # writing

    def create(self, name: str, size_bytes: int) -> ObjectWriter:
        with self._errors(name):
            return ObjectWriter(
                self, name, self._api.open_writer(self._store, f"data/{name}", buffer_size=_BUFFER_BYTES)
            )

    def put_part(self, name: str, data: bytes) -> None:
        self._put(f"data/{name}", data)

    def barrier(self) -> None:
        """A put that returned is durable."""

    def publish(self, generation: int, head: bytes) -> bool:
        key = f"manifests/{generation_name(generation)}"
        try:
            with self._errors(key):
                self._api.put(self._store, key, head, mode="create")
        except OSError as error:
            taken = self._api.exceptions.AlreadyExistsError, self._api.exceptions.PreconditionError, FileExistsError
            if isinstance(error.__cause__, taken) or isinstance(error, FileExistsError):
                return False
            raise
        return True

    def replace_head(self, generation: int, head: bytes) -> None:
        self._put(f"manifests/{generation_name(generation)}", head)

    # removing

    def withdraw(self, generations: Collection[int]) -> list[int]:
        if not generations:
            return []
        leased = self._leased()
        there = set(self.generations())
        gone = [g for g in sorted(generations) if generation_name(g) not in leased and g in there]
        self._delete([f"manifests/{generation_name(g)}" for g in gone])
        return gone

    def _leased(self) -> set[str]:
        """Names of heads with a lease younger than an hour by the server's own clock."""
        leases = self._list("leases")
        if not leases:
            return set()
        clock = f"leases/clock.{self._nonce()}"
        self._put(clock, b"")
        now = dict(self._list("leases"))[clock.rpartition("/")[2]]
        self._delete([clock])
        young = [name for name, at in leases if (now - at).total_seconds() < _LEASE_TTL_S]
        return {name.rpartition(".")[0] for name in young}

    def discard(self, names: Collection[str], *, recycle: Collection[str] = ()) -> None:
        self._delete([f"data/{name}" for name in sorted(names)])

    def make_room(self) -> int:
        return 0


class ObjectWriter:
    """A multipart upload, in order. Nothing is visible before `finish`."""

    concurrent = False

    def __init__(self, store: ObjectStore, name: str, file: Any) -> None:
        self.name, self._store, self._file = name, store, file

    def write(self, offset: int, data: memoryview) -> None:
        with self._store._errors(self.name):
            self._file.write(data)

    def finish(self, size_bytes: int) -> None:
        with self._store._errors(self.name):
            self._file.close()

    def abandon(self) -> None:
        """An upload that is not completed leaves no object; the store's own lifecycle rules clear its parts."""
        self._file = None


class ObjectReader:
    def __init__(self, store: ObjectStore, name: str, size_bytes: int) -> None:
        self.bytes, self._store, self._name = size_bytes, store, name

    def read(self, offset: int, buffer: memoryview) -> None:
        self._store.read_range(self._name, offset, buffer)

    def close(self) -> None:
        """Nothing is held open between requests."""


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
