-- What is open in a chat is found without reading what has ended there, whichever index a planner with old
-- statistics prefers.
--
--   ended_seq  every delivery of the chat up to this number has ended. It may be too low, and is never too high
set local lock_timeout = '5s';

alter table chats add column ended_seq bigint not null default 0;

-- Nodes of the version before replay a dead delivery without lowering `ended_seq`.
create or replace function make_chat_due() returns trigger
language plpgsql
set search_path = pg_catalog, public
as $$
begin
  update chats c
     set due_at = coalesce(c.due_at, now()), ended_seq = least(c.ended_seq, new.seq - 1)
   where c.tenant_id = new.tenant_id
     and c.platform = new.platform
     and c.scope = new.scope
     and c.chat_ref = new.chat_ref
     and (c.due_at is null or c.ended_seq >= new.seq);
  return null;
end
$$;
