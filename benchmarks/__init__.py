"""Measurements that are run by make targets and write tables: never asserted in tests."""
