"""The text backend's model: transformers' code and weights on torch, with a cache of our own.

folder.py     what a Hugging Face style folder holds, and what of it is refused
memory.py     how many sequences of how many tokens fit
cache.py      keys and values, a row for each sequence
attention.py  what a step computes of a ragged batch
torch_model.py  the model of backends.text
backend.py    the backend
"""
