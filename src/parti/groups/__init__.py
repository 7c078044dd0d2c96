"""Partitioned consumer groups, wire-compatible with the Go reference (orbit.go pcgroups).

Promises: messages of a partition are handled in order and one at a time, while the server confirms the pin; a member of
the Go library sees the same records, consumers and messages.

Flow: `elastic` or `static` joins -> `puller` pulls -> `pinned` checks -> `in_flight` runs the handler -> `acks`.
"""

from parti.groups import errors
from parti.groups.automatic import AutomaticMembership
from parti.groups.common import DeletePlan, MemberInfo
from parti.groups.describe import PartitionLag, describe
from parti.groups.distribution import assignment, least_moves, partition_filters, partitions_of, predict
from parti.groups.elastic import ElasticMember, elastic_consume
from parti.groups.elastic_groups import ElasticGroups
from parti.groups.events import EventKind, GroupEvent, GroupEvents, MemberState
from parti.groups.exactly_once import Transaction, exactly_once
from parti.groups.in_flight import HandlerOptions, Order
from parti.groups.member import GroupConsumer
from parti.groups.message import GroupMessage
from parti.groups.names import GroupKind
from parti.groups.options import MemberOptions
from parti.groups.records import ElasticRecord, MemberMapping, PartitioningFilter, StaticRecord
from parti.groups.static import StaticMember, static_consume
from parti.groups.static_groups import StaticGroups
from parti.groups.template import ConsumerTemplate

__all__ = [
    "AutomaticMembership",
    "ConsumerTemplate",
    "DeletePlan",
    "ElasticGroups",
    "ElasticMember",
    "ElasticRecord",
    "EventKind",
    "GroupConsumer",
    "GroupEvent",
    "GroupEvents",
    "GroupKind",
    "GroupMessage",
    "HandlerOptions",
    "MemberInfo",
    "MemberMapping",
    "MemberOptions",
    "MemberState",
    "Order",
    "PartitionLag",
    "PartitioningFilter",
    "StaticGroups",
    "StaticMember",
    "StaticRecord",
    "Transaction",
    "assignment",
    "describe",
    "elastic_consume",
    "errors",
    "exactly_once",
    "least_moves",
    "partition_filters",
    "partitions_of",
    "predict",
    "static_consume",
]
