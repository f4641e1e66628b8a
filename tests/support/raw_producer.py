"""Records that Python's own producer cannot send, by the C library underneath it: names of headers
that are no UTF-8."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import confluent_kafka

_END, _TOPIC, _PARTITION, _VALUE, _KEY, _MSGFLAGS, _TIMESTAMP, _HEADERS = 0, 1, 3, 4, 5, 7, 8, 10
"""`rd_kafka_vtype_t`."""

_COPY, _PRODUCER, _SHUTDOWN_MS = 2, 0, 30_000


def _library() -> Any:
    [path] = (Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs").glob(
        "librdkafka*.so*"
    )
    library = ctypes.CDLL(str(path))
    for name in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_headers_new"):
        getattr(library, name).restype = ctypes.c_void_p
    return library


def produce_raw(
    kafka: str,
    topic: str,
    value: bytes,
    headers: list[tuple[bytes, bytes]],
    *,
    key: bytes = b"",
    timestamp: int = 1,
    partition: int = 0,
) -> None:
    """Sends one record to a partition of a topic; returns once the broker has it."""
    library, fault = _library(), ctypes.create_string_buffer(512)
    conf = ctypes.c_void_p(library.rd_kafka_conf_new())
    assert library.rd_kafka_conf_set(conf, b"bootstrap.servers", kafka.encode(), fault, 512) == 0, (
        fault.value
    )
    producer = ctypes.c_void_p(library.rd_kafka_new(_PRODUCER, conf, fault, 512))
    made = ctypes.c_void_p(library.rd_kafka_headers_new(ctypes.c_size_t(len(headers))))
    size = ctypes.c_ssize_t
    for name, content in headers:
        assert (
            library.rd_kafka_header_add(made, name, size(len(name)), content, size(len(content)))
            == 0
        )
    said: list[Any] = [_TOPIC, topic.encode(), _PARTITION, partition, _MSGFLAGS, _COPY]
    said += [_VALUE, value, ctypes.c_size_t(len(value)), _KEY, key, ctypes.c_size_t(len(key))]
    said += [_TIMESTAMP, ctypes.c_int64(timestamp), _HEADERS, made, _END]
    assert library.rd_kafka_producev(producer, *said) == 0
    assert library.rd_kafka_flush(producer, _SHUTDOWN_MS) == 0
    library.rd_kafka_destroy(producer)
