"""Partitioned consumer groups, wire-compatible with the Go reference (orbit.go pcgroups)."""

from parti.groups import errors
from parti.groups.elastic_groups import ElasticGroups
from parti.groups.static_groups import StaticGroups

__all__ = ["ElasticGroups", "StaticGroups", "errors"]
