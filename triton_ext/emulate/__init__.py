"""Several hosts on one machine: network namespaces joined by links of a chosen speed (Linux, root).

Needs nothing but the standard library and iproute2.
"""

from .hosts import Hosts
from .measure import LinkSpeed, measure_link

__all__ = ["Hosts", "LinkSpeed", "measure_link"]
