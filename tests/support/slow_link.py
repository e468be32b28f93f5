"""A link between two network namespaces with a delay and a rate, for tests.

``python slow_link.py NAMESPACE DEVICE NAMESPACE DEVICE SECONDS BYTES_PER_S`` makes two TUN devices, moves each to its
namespace, prints "ready", and passes packets from one to the other until its standard input is closed. A packet leaves
when those before it have left at the rate, and arrives after the delay. The kernel's own delays (netem, tbf) are
modules that many machines do not have.
"""

from __future__ import annotations

import fcntl
import os
import queue
import struct
import subprocess
import sys
import threading
import time

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
#: Bytes of a packet at most: larger than Ethernet's, so that Python keeps up with 1 Gbit/s.
_MTU = 16_000


def _device(name: str, namespace: str) -> int:
    """Make a TUN device and move it; return its descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TUN | _IFF_NO_PI))
    for arguments in (["link", "set", name, "mtu", str(_MTU)], ["link", "set", name, "netns", namespace]):
        subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
    return descriptor


def _pass_on(source: int, target: int, delay: float, rate: float) -> None:
    """Pass packets on in one direction."""
    packets: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

    def deliver() -> None:
        while True:
            due, packet = packets.get()
            time.sleep(max(0.0, due - time.monotonic()))
            try:
                os.write(target, packet)
            except OSError:
                continue  # the other end is down: the packet is lost

    threading.Thread(target=deliver, daemon=True).start()
    is_free = 0.0  # the time when the packets before have left
    while True:
        try:
            packet = os.read(source, _MTU + 100)
        except OSError:  # this end is down
            time.sleep(0.01)
            continue
        is_free = max(is_free, time.monotonic()) + len(packet) / rate
        packets.put((is_free + delay, packet))


def main() -> None:
    namespaces, names = sys.argv[1:5:2], sys.argv[2:5:2]
    delay, rate = float(sys.argv[5]), float(sys.argv[6])
    one, other = (_device(name, namespace) for name, namespace in zip(names, namespaces, strict=True))
    for ends in ((one, other), (other, one)):
        threading.Thread(target=_pass_on, args=(*ends, delay, rate), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
