from .er import DEEPER

DEEP = DEEPER + 2
