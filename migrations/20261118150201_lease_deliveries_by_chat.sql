-- Leasing deliveries costs what is due, and not what is pending: a chat's row says when to look at the chat.
--
--   due_at  when the first delivery of the chat may be leased, or its lease ends; null while nothing of the
--           chat is pending or leased. It may be too early, and is never too late: whoever leases looks at
--           the deliveries and corrects it
--
-- Whoever changes a delivery that is pending or leased locks the chat first.
alter table chats add column due_at timestamptz;
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
