"""Devices: what chips can do, the mesh they form, how arrays are split over it, and what a
compiled program asks of it.
"""
