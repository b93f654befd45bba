"""Simulations of many servers, on paper."""
