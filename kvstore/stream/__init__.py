"""Connections that carry frames: how client and node talk over TCP, whatever the frames say."""

from kvstore.stream.frames import LENGTH_BYTES, PREAMBLE, FrameReader, framed
from kvstore.stream.stream import FrameStream, connect

__all__ = ["LENGTH_BYTES", "PREAMBLE", "FrameReader", "FrameStream", "connect", "framed"]
