"""What a load may return: sequentially consistent memory, and memory as weak as PTX allows."""
