"""Reliability checks: runs that are killed, stopped or given damaged files must end with bit-identical results."""
