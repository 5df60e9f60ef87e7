-- What is open in a chat is found without reading what has ended there, whichever index a planner with old
-- statistics prefers.
--
--   ended_seq  every delivery of the chat up to this number has ended. It may be too low, and is never too high
set local lock_timeout = '5s';

alter table chats add column ended_seq bigint not null default 0;

-- Nodes of the version before write neither `due_at` nor `ended_seq`. What they do is completed here, so that the
-- functions run for them and, of what nodes of this version do, only for a delivery that is pending again.
drop trigger deliveries_make_chat_due on deliveries;
drop function make_chat_due();

create function make_chat_due() returns trigger
language plpgsql
set search_path = pg_catalog, public
as $$
begin
  new.due_at := now();
  return new;
end
$$;
revoke execute on function make_chat_due() from public;
-- A delivery takes its number from its chat.
create trigger chats_make_due before insert or update of next_seq on chats
  for each row when (new.due_at is null) execute function make_chat_due();

create function make_chat_due_again() returns trigger
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
revoke execute on function make_chat_due_again() from public;
create trigger deliveries_make_chat_due after update of state on deliveries
  for each row when (new.state = 'pending') execute function make_chat_due_again();
