"""Mirrors of the rooms, contracts that every implementation must keep, and runs of real processes."""
