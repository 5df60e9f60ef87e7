//! Values that all domain modules use: names, times, pages, JSON as text.

pub mod json_text;
pub mod outside_text;
pub mod paging;
pub mod raw_members;
pub mod resource_name;
pub mod text_enum;
pub mod timestamp;
