"""Lines of the tables of `config/block.py`: what a block may be made of beside what the
released model's are.
"""
