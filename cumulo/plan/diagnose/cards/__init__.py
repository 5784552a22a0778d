"""Tests of single cards and links: perftest, OSU, iperf3."""
