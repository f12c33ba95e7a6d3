"""The end of a ZMQ context, bounded: its `term` has been seen to hang for ever (libzmq 4.3.5, a connection that
broke while its socket was closing). A thread that nobody must wait for takes that risk."""

import threading

import zmq


def end_context(context: "zmq.Context[zmq.Socket[bytes]]") -> threading.Thread:
    """Begins to end a context whose sockets are closed. The thread ends when their last frames have left."""
    ending = threading.Thread(target=context.term, name="zmq-term", daemon=True)
    ending.start()
    return ending
