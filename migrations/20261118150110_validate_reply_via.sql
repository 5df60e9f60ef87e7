-- Reads the whole table, beside those who write.
alter table turns validate constraint turns_reply_via_known;
