-- Leasing deliveries costs what is due, and not what is pending: a chat's row says when to look at the chat.
--
--   due_at  when the first delivery of the chat may be leased, or its lease ends; null while nothing of the
--           chat is pending or leased. It may be too early, and is never too late: whoever leases looks at
--           the deliveries and corrects it
--
-- Whoever changes a delivery that is pending or leased locks the chat first.
set local lock_timeout = '5s';

alter table chats add column due_at timestamptz;
-- The owner sees no row while row-level security is forced.
alter table chats no force row level security;
alter table deliveries no force row level security;
update chats c
   set due_at = now()
 where exists (select 1
                 from deliveries d
                where d.tenant_id = c.tenant_id
                  and d.platform = c.platform
                  and d.scope = c.scope
                  and d.chat_ref = c.chat_ref
                  and d.state in ('pending', 'leased'));
create index chats_due on chats (tenant_id, platform, scope, due_at) where due_at is not null;

-- For the expiry of what has ended.
update deliveries
   set ended_at = created_at
 where state in ('delivered', 'dead', 'cancelled')
   and ended_at is null;
create index deliveries_ended on deliveries (tenant_id, ended_at) where ended_at is not null;
alter table chats force row level security;
alter table deliveries force row level security;

-- Nodes of the version before do not write `due_at`, and run beside new ones during an upgrade.
create function make_chat_due() returns trigger
language plpgsql
set search_path = pg_catalog, public
as $$
begin
  update chats c
     set due_at = now()
   where c.tenant_id = new.tenant_id
     and c.platform = new.platform
     and c.scope = new.scope
     and c.chat_ref = new.chat_ref
     and c.due_at is null;
  return null;
end
$$;
revoke execute on function make_chat_due() from public;
create trigger deliveries_make_chat_due after insert or update of state on deliveries
  for each row when (new.state = 'pending') execute function make_chat_due();
