//! dcqcn
